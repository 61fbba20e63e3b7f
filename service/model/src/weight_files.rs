//! How files of weights are named: those of a component's folder, their shards, and adapters.

/// Beginnings of the names of weights, in the order of lookup: of diffusers, and of transformers.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", TRANSFORMERS];

/// The beginning of the names that transformers gives to weights.
const TRANSFORMERS: &str = "model";

/// Variants of weights that are read where there are no others.
const VARIANTS: [&str; 2] = ["fp16", "bf16"];

/// Names that the weights of a component's folder may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightNames {
    stem: &'static str,
    variant: Option<&'static str>,
}

impl WeightNames {
    /// All names of weight files that are read, in the order of lookup. Variants are read where there are no others.
    pub fn all() -> impl Iterator<Item = WeightNames> {
        let of_stem = |stem| VARIANTS.map(|variant| (stem, Some(variant)));
        let plain = STEMS.map(|stem| (stem, None)).into_iter();
        let all = plain.chain(STEMS.into_iter().flat_map(of_stem));
        all.map(|(stem, variant)| WeightNames { stem, variant })
    }

    /// The file that has all weights: `model.safetensors`, `model.fp16.safetensors`.
    pub fn single(&self) -> String {
        match self.variant {
            None => format!("{}.safetensors", self.stem),
            Some(variant) => format!("{}.{variant}.safetensors", self.stem),
        }
    }

    /// The index of shards: `model.safetensors.index.json`, `model.safetensors.index.fp16.json`.
    pub fn index(&self) -> String {
        match self.variant {
            None => format!("{}.safetensors.index.json", self.stem),
            Some(variant) => format!("{}.safetensors.index.{variant}.json", self.stem),
        }
    }

    /// Number and count of a shard of these weights: `model-00001-of-00002.safetensors`, of a variant
    /// `model.fp16-00001-of-00002.safetensors`, or `model-00001-of-00002.fp16.safetensors` as older programs write it.
    pub fn shard(&self, name: &str) -> Option<(usize, usize)> {
        let rest = name.strip_prefix(self.stem)?.strip_suffix(".safetensors")?;
        match self.variant {
            None => numbers(rest),
            Some(variant) => {
                let dotted = format!(".{variant}");
                let new = rest.strip_prefix(&dotted).and_then(numbers);
                new.or_else(|| rest.strip_suffix(&dotted).and_then(numbers))
            }
        }
    }

    /// Whether the single file is taken if a folder has both it and an index with shards, as transformers does.
    pub fn prefers_single(&self) -> bool {
        self.stem == TRANSFORMERS && self.variant.is_none()
    }
}

/// Number and count of `-00001-of-00002`.
fn numbers(text: &str) -> Option<(usize, usize)> {
    let (number, count) = text.strip_prefix('-')?.split_once("-of-")?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(count)).then_some((number.parse().ok()?, count.parse().ok()?))
}

/// Whether a file's name is that of one of several shards, of any weights.
pub fn is_shard(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else {
        return false;
    };
    let plain = VARIANTS
        .iter()
        .find_map(|variant| stem.strip_suffix(variant)?.strip_suffix('.'))
        .unwrap_or(stem);
    let mut dashes = plain.match_indices('-').map(|(at, _)| at);
    dashes.any(|at| numbers(&plain[at..]).is_some())
}

/// Endings of adapters in one file.
const ENDINGS: [&str; 2] = ["safetensors", "sft"];

/// Names of an adapter's weights in a folder of peft or diffusers.
pub const ADAPTER_WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "pytorch_lora_weights.safetensors"];

/// The configuration beside the weight files of an adapter.
pub const ADAPTER_CONFIGURATION: &str = "adapter_config.json";

/// The name of an adapter in one file without its ending; `None` for a file of another kind.
pub fn adapter_stem(name: &str) -> Option<&str> {
    let (stem, ending) = name.rsplit_once('.')?;
    let is_one = |known: &&str| ending.eq_ignore_ascii_case(known);
    (!stem.is_empty() && ENDINGS.iter().any(is_one)).then_some(stem)
}
