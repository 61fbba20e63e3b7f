//! ComfyUI's folders and their meanings: those in `FOLDER/models`, and those that `extra_model_paths.yaml` adds.

use std::path::{Path, PathBuf};

use yaml_rust2::{Yaml, YamlLoader};

/// The file that configures further folders.
const EXTRA: &str = "extra_model_paths.yaml";

/// Most bytes that are read of that file.
const LONGEST_EXTRA: u64 = 1 << 20;

/// The kind of files in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Transformers and whole checkpoints in one file.
    Models,
    /// LoRA.
    Loras,
    /// ControlNets.
    ControlNets,
}

impl Meaning {
    /// The meaning of a folder by its name; `None` for parts of models (VAE, text encoders) and for kinds that do not run here.
    fn of(name: &str) -> Option<Meaning> {
        match name {
            "diffusion_models" | "unet" | "unet_gguf" | "checkpoints" | "diffusers" => Some(Meaning::Models),
            "loras" => Some(Meaning::Loras),
            "controlnet" => Some(Meaning::ControlNets),
            _ => None,
        }
    }
}

/// A folder and the kind of its files.
pub(super) type Place = (Meaning, PathBuf);

/// The folders of an installation, in the order in which ComfyUI searches them, and the problem of its
/// `extra_model_paths.yaml`, if there is one.
pub(super) fn places(installation: &Path) -> (Vec<Place>, Option<String>) {
    // ComfyUI searches `unet`, the older name of the folder of transformers, first.
    let own = [
        "checkpoints",
        "loras",
        "unet",
        "diffusion_models",
        "diffusers",
        "controlnet",
    ];
    let own = own.iter().filter_map(|name| {
        let folder = installation.join("models").join(name);
        Some((Meaning::of(name)?, folder))
    });
    let mut places: Vec<Place> = own.collect();
    let problem = match further(installation) {
        Ok(further) => {
            for (place, is_default) in further {
                match is_default {
                    true => places.insert(0, place),
                    false => places.push(place),
                }
            }
            None
        }
        Err(problem) => Some(problem),
    };
    (places, problem)
}

/// The folders in the file, each with a flag: whether ComfyUI searches it before all others.
fn further(installation: &Path) -> Result<Vec<(Place, bool)>, String> {
    let file = installation.join(EXTRA);
    if !file.is_file() {
        return Ok(Vec::new());
    }
    let wrong = |problem: String| format!("{} cannot be read: {problem}", file.display());
    let text = gpu::text_bounded(&file, LONGEST_EXTRA).map_err(|error| wrong(error.to_string()))?;
    let documents = YamlLoader::load_from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let Some(Yaml::Hash(groups)) = documents.first() else {
        return Ok(Vec::new()); // nothing but comments, as it is shipped
    };
    let mut further = Vec::new();
    for group in groups.values() {
        let Yaml::Hash(entries) = group else { continue };
        let text_of = |name: &str| {
            let value = entries.get(&Yaml::String(name.to_owned()));
            value.and_then(Yaml::as_str)
        };
        let base = installation.join(text_of("base_path").map(config::expanded).unwrap_or_default());
        let is_default = entries.get(&Yaml::String("is_default".to_owned()));
        let is_default = is_default.and_then(Yaml::as_bool).unwrap_or_default();
        for (name, value) in entries {
            let meaning = name.as_str().and_then(Meaning::of);
            let (Some(meaning), Some(lines)) = (meaning, value.as_str()) else {
                continue;
            };
            let folders = lines.lines().map(str::trim).filter(|line| !line.is_empty());
            further
                .extend(folders.map(|folder| ((meaning, base.join(config::expanded(folder))), is_default)));
        }
    }
    Ok(further)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::tests::folder_with;

    #[test]
    fn the_file_of_further_folders_is_read_as_comfyui_reads_it() {
        let folder = folder_with(&["models/checkpoints/x.safetensors"]);
        std::fs::write(
            folder.path().join(EXTRA),
            "# comments\n\
             a111:\n    base_path: /srv/webui/\n    loras: |\n         models/Lora\n         models/LyCORIS\n    \
             vae: models/VAE\n    unet: /else/where\n\
             mine:\n    base_path: shared\n    is_default: true\n    diffusion_models: transformers\n    controlnet: nets\n\
             empty:\n\
             variables:\n    base_path: ${CARGO_MANIFEST_DIR}\n    loras: $NO_SUCH_VARIABLE/loras\n",
        )
        .unwrap();
        let (places, problem) = places(folder.path());
        assert_eq!(problem, None);
        let has = |meaning: Meaning, path: &Path| places.contains(&(meaning, path.to_owned()));
        assert!(has(Meaning::Loras, Path::new("/srv/webui/models/Lora")));
        assert!(has(Meaning::Loras, Path::new("/srv/webui/models/LyCORIS")));
        assert!(has(Meaning::Models, Path::new("/else/where")));
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(has(Meaning::Loras, &own.join("$NO_SUCH_VARIABLE/loras")));
        assert!(has(Meaning::ControlNets, &folder.path().join("shared/nets")));
        assert!(has(Meaning::Models, &folder.path().join("models/unet")));
        assert!(
            places.iter().all(|(_, path)| !path.ends_with("VAE")),
            "a companion"
        );
        let first = places
            .iter()
            .find(|(meaning, _)| *meaning == Meaning::Models)
            .unwrap();
        assert_eq!(
            first.1,
            folder.path().join("shared/transformers"),
            "the default goes first"
        );
    }

    #[test]
    fn a_file_that_is_no_yaml_is_reported() {
        let folder = folder_with(&[]);
        std::fs::write(folder.path().join(EXTRA), "a: [\n").unwrap();
        let (places, problem) = places(folder.path());
        assert!(!places.is_empty() && problem.unwrap().contains(EXTRA));
        let long = format!("a:\n    loras: x\n{}", "# a comment\n".repeat(100_000));
        std::fs::write(folder.path().join(EXTRA), long).unwrap();
        let (_, problem) = super::places(folder.path());
        assert!(problem.unwrap().contains("more than 1.0 MiB"));
    }
}
