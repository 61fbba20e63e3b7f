//! Which files of a repository a pipeline is read from. A repository in diffusers' layout often holds the same weights
//! several times: as single checkpoints at its root, in half precision, for other frameworks. One copy is enough.

use model::{ADAPTER_CONFIGURATION, ADAPTER_WEIGHTS, OwnLayout, WeightNames};

use crate::PullError;
use crate::error::{list, list_all, shown};
use crate::reference::FILES;

/// The file that a repository needs to be a pipeline.
pub(crate) const INDEX: &str = "model_index.json";
/// Optional file with a model's own defaults.
const DEFAULTS: &str = "moored.json";
/// Endings of the files beside the weights: configurations, vocabularies.
const SMALL: [&str; 3] = [".json", ".txt", ".model"];
/// Endings of weights, in any format.
const WEIGHTS: [&str; 9] = [
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".msgpack",
    ".h5",
    ".onnx",
    ".gguf",
];

/// The files, of all files of a repository, that these folders of a pipeline are read from.
///
/// # Errors
/// When a folder is missing, or its weights are not in safetensors.
pub(crate) fn wanted(id: &str, folders: &[&str], files: &[&str]) -> Result<Vec<String>, PullError> {
    let at_root = [INDEX, DEFAULTS].into_iter().filter(|name| files.contains(name));
    let mut wanted: Vec<String> = at_root.map(str::to_owned).collect();
    for folder in folders {
        let prefix = format!("{folder}/");
        let inside: Vec<&str> = files
            .iter()
            .filter_map(|file| file.strip_prefix(&prefix))
            .filter(|name| !name.contains('/'))
            .collect();
        let chosen = of_folder(&inside).map_err(|problem| {
            PullError::NotAPipeline(format!(
                "{id} cannot be run from what it holds: {folder} {problem}"
            ))
        })?;
        wanted.extend(chosen.into_iter().map(|name| format!("{folder}/{name}")));
    }
    let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
    let missing = missing(folders, &names);
    if !missing.is_empty() {
        return Err(PullError::NotAPipeline(format!(
            "{id} cannot be run from what it holds: {} missing there",
            list(&missing)
        )));
    }
    Ok(wanted)
}

/// The files of a repository in the layout of a model's authors.
///
/// # Errors
/// As [`wanted`].
pub(crate) fn of_own_layout(id: &str, layout: &OwnLayout, files: &[&str]) -> Result<Vec<String>, PullError> {
    let folders: Vec<&str> = layout.folders.iter().map(String::as_str).collect();
    let mut wanted = wanted(id, &folders, files)?;
    wanted.extend(layout.files.iter().cloned());
    Ok(wanted)
}

/// The needed files of one folder.
fn of_folder<'a>(names: &[&'a str]) -> Result<Vec<&'a str>, String> {
    if names.is_empty() {
        return Err("is missing".to_owned());
    }
    let is_small = |name: &&str| SMALL.iter().any(|end| name.ends_with(end)) && !name.contains(".index.");
    let mut chosen: Vec<&str> = names.iter().copied().filter(is_small).collect();
    let weights: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| WEIGHTS.iter().any(|end| name.ends_with(end)))
        .collect();
    if weights.is_empty() {
        return Ok(chosen);
    }
    match weights_among(names) {
        Some((_, files)) => chosen.extend(files),
        None => {
            return Err(format!(
                "has no weights in plain safetensors, only {}",
                shown(&weights.join(", "))
            ));
        }
    }
    Ok(chosen)
}

/// The first weights that are read, and their files, of all names of a folder.
fn weights_among<'a>(names: &[&'a str]) -> Option<(WeightNames, Vec<&'a str>)> {
    WeightNames::all().find_map(|weights| Some((weights, in_safetensors(&weights, names)?)))
}

/// The weights of these names: one file, or an index with its shards.
fn in_safetensors<'a>(weights: &WeightNames, names: &[&'a str]) -> Option<Vec<&'a str>> {
    let single = weights.single();
    let single = || Some(vec![*names.iter().find(|name| **name == single)?]);
    let index = weights.index();
    let sharded = || {
        let mut files = vec![*names.iter().find(|name| **name == index)?];
        files.extend(names.iter().filter(|name| weights.shard(name).is_some()));
        (files.len() > 1).then_some(files)
    };
    match weights.prefers_single() {
        true => single().or_else(sharded),
        false => sharded().or_else(single),
    }
}

/// The files that these folders lack, as far as that is known without the hub.
pub(crate) fn missing(folders: &[&str], files: &[&str]) -> Vec<String> {
    let of_folder = |folder: &&str| {
        let prefix = format!("{folder}/");
        let inside: Vec<&str> = files
            .iter()
            .filter_map(|file| file.strip_prefix(&prefix))
            .collect();
        missing_in(folder, &prefix, &inside)
    };
    folders.iter().flat_map(of_folder).collect()
}

/// `-00001-of-00002` in the name of a shard.
fn numbers(number: usize, count: usize) -> String {
    format!("-{number:05}-of-{count:05}")
}

/// The files that a repository with a component at its root lacks.
pub(crate) fn missing_at_root(files: &[&str]) -> Vec<String> {
    missing_in("the model", "", files)
}

/// The files that a folder lacks, whose names there begin with `prefix`.
fn missing_in(folder: &str, prefix: &str, inside: &[&str]) -> Vec<String> {
    let mut missing = Vec::new();
    let has_config = inside
        .iter()
        .any(|name| name.ends_with(".json") && !name.contains(".index."));
    if !has_config {
        missing.push(format!("the configuration in {prefix}"));
    }
    if !inside.contains(&CONFIGURATION) {
        return missing; // a scheduler or a tokenizer: no weights
    }
    match weights_among(inside) {
        None => missing.push(format!("the weights of {folder}")),
        Some((weights, chosen)) => {
            let shards = chosen
                .iter()
                .filter_map(|name| Some((*name, weights.shard(name)?)));
            let shards: Vec<(&str, (usize, usize))> = shards.collect();
            if let Some(&(first, (of_first, count))) = shards.first() {
                let is_there = |number: &usize| shards.iter().any(|(_, shard)| *shard == (*number, count));
                let absent = (1..=count).filter(|number| !is_there(number));
                let named = |number| first.replace(&numbers(of_first, count), &numbers(number, count));
                missing.extend(absent.map(|number| format!("{prefix}{}", named(number))));
            }
        }
    }
    missing
}

/// The configuration of a ControlNet, or of a transformer alone.
pub(crate) const CONFIGURATION: &str = "config.json";

/// The files of an adapter in a repository that is no pipeline: of peft or diffusers, or the only file in safetensors at its
/// root. `None` if there is none, or more than one.
pub(crate) fn of_adapter(files: &[&str]) -> Option<Vec<String>> {
    let has = |name: &str| files.contains(&name);
    let mut at_root = files
        .iter()
        .filter(|file| !file.contains('/') && file.ends_with(".safetensors"));
    let weights = match (
        ADAPTER_WEIGHTS.iter().find(|name| has(name)),
        at_root.next(),
        at_root.next(),
    ) {
        (Some(named), _, _) => *named,
        (None, Some(only), None) if !has(CONFIGURATION) => *only,
        _ => return None,
    };
    let configuration = Some(ADAPTER_CONFIGURATION).filter(|name| has(name));
    let all = std::iter::once(weights).chain(configuration);
    Some(all.map(str::to_owned).collect())
}

/// The files of a ControlNet or a transformer in a repository with a configuration at its root.
pub(crate) fn of_root(files: &[&str]) -> Option<Vec<String>> {
    let at_root: Vec<&str> = files.iter().copied().filter(|file| !file.contains('/')).collect();
    let (_, weights) = weights_among(&at_root)?;
    let all = std::iter::once(CONFIGURATION).chain(weights);
    Some(all.map(str::to_owned).collect())
}

/// The file that a reference names, with the configuration beside it.
///
/// # Errors
/// When the repository does not have it.
pub(crate) fn of_file(id: &str, file: &str, files: &[&str]) -> Result<Vec<String>, PullError> {
    if !files.contains(&file) {
        let there: Vec<&str> = files.iter().copied().filter(|file| is_weights(file)).collect();
        return Err(PullError::NotAPipeline(match &there[..] {
            [] => format!("{id} has no file {file}, and none in safetensors or GGUF"),
            there => format!("{id} has no file {file}; it has {}", shown(&there.join(", "))),
        }));
    }
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let configuration = match folder {
        "" => ADAPTER_CONFIGURATION.to_owned(),
        folder => format!("{folder}/{ADAPTER_CONFIGURATION}"),
    };
    let configuration = Some(configuration).filter(|name| files.contains(&name.as_str()));
    Ok(std::iter::once(file.to_owned()).chain(configuration).collect())
}

/// Whether a file may be pulled by its name.
pub(crate) fn is_weights(file: &str) -> bool {
    FILES.iter().any(|ending| file.ends_with(ending))
}

/// Whether weights of this name are those of their folder, rather than a model of their own.
pub(crate) fn is_of_folder(name: &str) -> bool {
    WeightNames::all().any(|weights| weights.single() == name)
}

/// Whether a file is one of several shards.
pub(super) fn is_shard(file: &str) -> bool {
    model::is_shard(file.rsplit('/').next().unwrap_or_default())
}

/// The error for a repository that is no pipeline, with a remedy for single files.
pub(crate) fn no_pipeline(id: &str, files: &[&str]) -> PullError {
    let single: Vec<&str> = files.iter().copied().filter(|file| is_weights(file)).collect();
    PullError::NotAPipeline(match single.first() {
        Some(first) => format!(
            "{id} is no pipeline but {} single file(s): pull the one that you want by its name, as in `moored pull \
             {id}:{first}`; it has {}",
            single.len(),
            list_all(&single),
        ),
        None => format!("{id} is no pipeline: it has no {INDEX}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::Families as _;

    fn folders() -> &'static [&'static str] {
        pipelines::families().folders_of("FluxPipeline").unwrap()
    }

    #[test]
    fn one_model_of_an_authors_repository_is_selected_with_its_companions() {
        let mut files = vec![
            "README.md",
            "config.json",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
            "Qwen3-Embedding-0.6B/config.json",
            "Qwen3-Embedding-0.6B/tokenizer.json",
            "Qwen3-Embedding-0.6B/model.safetensors",
            "acestep-5Hz-lm-1.7B/config.json",
            "acestep-5Hz-lm-1.7B/model.safetensors",
            "acestep-v15-base/config.json",
            "acestep-v15-base/silence_latent.pt",
            "acestep-v15-base/model.safetensors",
            "acestep-v15-turbo/config.json",
            "acestep-v15-turbo/configuration_acestep_v15.py",
            "acestep-v15-turbo/silence_latent.pt",
            "acestep-v15-turbo/model.safetensors",
        ];
        let layout = pipelines::families().own_layout(&files).unwrap();
        let mut wanted = of_own_layout("me/music", &layout, &files).unwrap();
        wanted.sort();
        let expected = [
            "Qwen3-Embedding-0.6B/config.json",
            "Qwen3-Embedding-0.6B/model.safetensors",
            "Qwen3-Embedding-0.6B/tokenizer.json",
            "acestep-v15-turbo/config.json",
            "acestep-v15-turbo/model.safetensors",
            "acestep-v15-turbo/silence_latent.pt",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
        ];
        assert_eq!(wanted, expected);
        files.retain(|file| !file.starts_with("vae/d"));
        let refused = of_own_layout("me/music", &layout, &files)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("vae"), "{refused}");
        files.retain(|file| !file.starts_with("vae"));
        assert_eq!(
            pipelines::families().own_layout(&files),
            None,
            "there is nothing to decode with"
        );
    }

    /// Layout of a large repository, with files that are not needed.
    const FILES: [&str; 45] = [
        ".gitattributes",
        "LICENSE.md",
        "README.md",
        "ae.safetensors",
        "flux1-dev.safetensors",
        "dev_grid.jpg",
        "model_index.json",
        "feature_extractor/preprocessor_config.json",
        "safety_checker/config.json",
        "safety_checker/model.safetensors",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/flax_model.msgpack",
        "text_encoder/model.fp16.safetensors",
        "text_encoder/model.onnx",
        "text_encoder/model.safetensors",
        "text_encoder/pytorch_model.bin",
        "text_encoder/pytorch_model.fp16.bin",
        "text_encoder_2/config.json",
        "text_encoder_2/model-00001-of-00002.safetensors",
        "text_encoder_2/model-00002-of-00002.safetensors",
        "text_encoder_2/model.fp16-00001-of-00001.safetensors",
        "text_encoder_2/model-00001-of-00002.fp16.safetensors",
        "text_encoder_2/model.safetensors.index.json",
        "text_encoder_2/model.safetensors.index.fp16.json",
        "text_encoder_2/model.fp16.safetensors.index.json",
        "tokenizer/merges.txt",
        "tokenizer/special_tokens_map.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/vocab.json",
        "tokenizer_2/special_tokens_map.json",
        "tokenizer_2/spiece.model",
        "tokenizer_2/tokenizer.json",
        "tokenizer_2/tokenizer_config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00003.safetensors",
        "transformer/diffusion_pytorch_model-00003-of-00003.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "transformer/old/config.json",
        "transformer/old/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors.index.json",
        "vae_decoder/model.onnx",
    ];

    #[test]
    fn one_copy_of_the_weights_is_selected() {
        let mut taken = wanted("me/mine", folders(), &FILES).unwrap();
        taken.sort();
        let expected = [
            "model_index.json",
            "scheduler/scheduler_config.json",
            "text_encoder/config.json",
            "text_encoder/model.safetensors",
            "text_encoder_2/config.json",
            "text_encoder_2/model-00001-of-00002.safetensors",
            "text_encoder_2/model-00002-of-00002.safetensors",
            "text_encoder_2/model.safetensors.index.json",
            "tokenizer/merges.txt",
            "tokenizer/special_tokens_map.json",
            "tokenizer/tokenizer_config.json",
            "tokenizer/vocab.json",
            "tokenizer_2/special_tokens_map.json",
            "tokenizer_2/spiece.model",
            "tokenizer_2/tokenizer.json",
            "tokenizer_2/tokenizer_config.json",
            "transformer/config.json",
            "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
            "transformer/diffusion_pytorch_model-00002-of-00003.safetensors",
            "transformer/diffusion_pytorch_model-00003-of-00003.safetensors",
            "transformer/diffusion_pytorch_model.safetensors.index.json",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
        ];
        assert_eq!(taken, expected);
    }

    #[test]
    fn weights_that_are_not_in_plain_safetensors_are_refused() {
        let said = |files: &[&str]| wanted("me/mine", &["vae"], files).unwrap_err().to_string();
        let only_bin = said(&["vae/config.json", "vae/diffusion_pytorch_model.bin"]);
        assert!(
            only_bin.contains("vae has no weights in plain safetensors"),
            "{only_bin}"
        );
        let none = said(&["model_index.json"]);
        assert!(none.contains("vae is missing"), "{none}");
        let no_shards = said(&["vae/model.safetensors.index.json", "vae/model.8bit.safetensors"]);
        assert!(no_shards.contains("no weights"), "{no_shards}");
        let only_config = said(&["vae/config.json"]);
        assert!(
            only_config.contains("the weights of vae is missing"),
            "{only_config}"
        );
        let (index, shard) = (
            "vae/model.safetensors.index.json",
            "vae/model-00001-of-00002.safetensors",
        );
        let one_shard = said(&["vae/config.json", index, shard]);
        assert!(
            one_shard.contains("vae/model-00002-of-00002.safetensors is missing"),
            "{one_shard}"
        );
    }

    /// The files that are read from a folder are pulled, and variants only where there are no others.
    #[test]
    fn weights_in_half_precision_are_selected_where_there_are_no_others() {
        let selected = |weights: &[&str]| {
            let there: Vec<String> = (weights.iter().chain(&["config.json"]))
                .map(|name| format!("vae/{name}"))
                .collect();
            let there: Vec<&str> = there.iter().map(String::as_str).collect();
            let taken = wanted("me/mine", &["vae"], &there)?;
            let mut taken: Vec<String> = taken
                .iter()
                .filter_map(|name| name.strip_prefix("vae/"))
                .filter(|name| *name != "config.json")
                .map(str::to_owned)
                .collect();
            taken.sort();
            Ok::<_, PullError>(taken)
        };
        let half = "diffusion_pytorch_model.fp16.safetensors";
        assert_eq!(selected(&[half]).unwrap(), [half]);
        let full = "model.safetensors";
        assert_eq!(selected(&[half, full]).unwrap(), [full]);
        let index = "model.safetensors.index.bf16.json";
        for shards in [
            [
                "model.bf16-00001-of-00002.safetensors",
                "model.bf16-00002-of-00002.safetensors",
            ],
            [
                "model-00001-of-00002.bf16.safetensors",
                "model-00002-of-00002.bf16.safetensors",
            ],
        ] {
            let [first, second] = shards;
            let mut whole = vec![first, second, index];
            whole.sort_unstable();
            assert_eq!(selected(&[index, first, second]).unwrap(), whole);
            let missing = selected(&[index, first]).unwrap_err().to_string();
            assert!(missing.contains(&format!("vae/{second} is missing")), "{missing}");
            assert!(is_shard(first), "{first}");
        }
        assert!(is_of_folder(half) && !is_of_folder("mine.fp16.safetensors") && !is_shard(half));
    }

    #[test]
    fn of_a_file_and_shards_the_shards_of_diffusers_are_taken_and_the_file_of_transformers() {
        for (stem, taken) in [
            (
                "diffusion_pytorch_model",
                &[".safetensors.index.json", "-00001-of-00001.safetensors"][..],
            ),
            ("model", &[".safetensors"]),
        ] {
            let there = [
                ".safetensors",
                ".safetensors.index.json",
                "-00001-of-00001.safetensors",
            ];
            let there = there.map(|ending| format!("{stem}{ending}"));
            let there: Vec<&str> = there.iter().map(String::as_str).collect();
            let taken: Vec<String> = taken.iter().map(|ending| format!("{stem}{ending}")).collect();
            let (_, files) = weights_among(&there).unwrap();
            assert_eq!(files, taken);
        }
    }

    #[test]
    fn the_error_for_single_files_lists_them() {
        let said = no_pipeline(
            "me/mine",
            &["README.md", "flux1-dev-Q4_0.gguf", "flux1-dev-Q8_0.gguf"],
        )
        .to_string();
        assert!(
            said.contains("`moored pull me/mine:flux1-dev-Q4_0.gguf`"),
            "{said}"
        );
        assert!(said.contains("2 single file(s)"), "{said}");
        assert!(said.contains("flux1-dev-Q8_0.gguf"), "{said}");
        assert!(
            no_pipeline("me/mine", &["README.md"])
                .to_string()
                .contains("model_index.json")
        );
    }

    #[test]
    fn a_film_pipeline_is_selected_whole_and_framepacks_parts_by_repository() {
        let families = pipelines::families();
        let folders = |class: &str| families.folders_of(class).unwrap();
        let component = |folder: &str, stem: &str| {
            [
                format!("{folder}/config.json"),
                format!("{folder}/{stem}.safetensors"),
            ]
        };
        let mut files: Vec<String> = [
            component("transformer", "diffusion_pytorch_model"),
            component("vae", "diffusion_pytorch_model"),
            component("text_encoder", "model"),
            component("text_encoder_2", "model"),
        ]
        .concat();
        for small in [
            "scheduler/scheduler_config.json",
            "tokenizer/tokenizer.json",
            "tokenizer_2/tokenizer.json",
            "model_index.json",
        ] {
            files.push(small.to_owned());
        }
        let names: Vec<&str> = files.iter().map(String::as_str).collect();
        let mut taken = wanted("me/film", folders("HunyuanVideoPipeline"), &names).unwrap();
        let mut expected = files.clone();
        taken.sort();
        expected.sort();
        assert_eq!(taken, expected);
        let said = wanted("me/film", folders("HunyuanVideoFramepackPipeline"), &names).unwrap_err();
        assert!(
            said.to_string().contains("feature_extractor is missing"),
            "{said}"
        );

        let redux = [
            "model_index.json",
            "feature_extractor/preprocessor_config.json",
            "image_embedder/config.json",
            "image_embedder/diffusion_pytorch_model.safetensors",
            "image_encoder/config.json",
            "image_encoder/model.safetensors",
        ];
        let taken = wanted("me/redux", folders("FluxPriorReduxPipeline"), &redux).unwrap();
        assert!(taken.contains(&redux[5].to_owned()) && !taken.contains(&redux[3].to_owned()));
        assert_eq!(taken.len(), 4);

        let transformer = [
            "README.md",
            "config.json",
            "diffusion_pytorch_model-00001-of-00002.safetensors",
            "diffusion_pytorch_model-00002-of-00002.safetensors",
            "diffusion_pytorch_model.safetensors.index.json",
        ];
        let mut taken = of_root(&transformer).unwrap();
        taken.sort();
        assert_eq!(taken, transformer[1..]);
        assert_eq!(missing_at_root(&transformer), Vec::<String>::new());
        assert_eq!(
            missing_at_root(&[&transformer[..2], &transformer[3..]].concat()),
            transformer[2..3]
        );
    }

    #[test]
    fn missing_files_are_named() {
        let taken = wanted("me/mine", folders(), &FILES).unwrap();
        let all: Vec<&str> = taken.iter().map(String::as_str).collect();
        assert_eq!(missing(folders(), &all), Vec::<String>::new());
        for (gone, told) in [
            (
                "transformer/diffusion_pytorch_model-00002-of-00003.safetensors",
                "transformer/diffusion_pytorch_model-00002-of-00003.safetensors",
            ),
            ("vae/diffusion_pytorch_model.safetensors", "the weights of vae"),
            (
                "scheduler/scheduler_config.json",
                "the configuration in scheduler/",
            ),
        ] {
            let left: Vec<&str> = all.iter().copied().filter(|name| *name != gone).collect();
            assert_eq!(missing(folders(), &left), [told], "{gone}");
        }
    }
}
