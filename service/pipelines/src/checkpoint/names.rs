//! The names that one layer has in the files of different programs, for checkpoints and adapters alike.
//!
//! A layout here knows a tensor by its name in diffusers and by its authors' name, which says where fused rows are
//! ([`TensorSpec`](super::TensorSpec)). All further names are rows of a family's [`LayerNames`]. The prefixes that programs add
//! to all names are in [`unwrapped`].

use std::collections::BTreeSet;

/// Parts that programs put in front of all names of a denoiser: ComfyUI (`model.diffusion_model`, `diffusion_model`),
/// diffusers and ai-toolkit (`transformer`), trainers (`module`, `model`, `dit`, `net`, `unet`, `denoiser`), and peft
/// (`base_model.model`). Several may follow each other.
const WRAPPERS: [&str; 9] = [
    "model",
    "diffusion_model",
    "transformer",
    "module",
    "base_model",
    "dit",
    "net",
    "unet",
    "denoiser",
];

/// Parts that PyTorch puts in front of names, or anywhere into them, where a module was compiled or wrapped before it was
/// saved.
const TRANSPARENT: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Names that layers of a family have in files of other programs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerNames(
    /// A part of an authors' name, and the parts that other programs write for it. A part is a run of segments between
    /// dots; `*` is any one segment.
    pub(crate) &'static [(&'static str, &'static [&'static str])],
);

impl LayerNames {
    /// The authors' name of a tensor or layer that a file calls `name`, without its prefix.
    pub(crate) fn authors(self, name: &str) -> String {
        let mut name = without_transparent(name);
        for (authors, others) in self.0 {
            if let Some(renamed) = others.iter().find_map(|other| replaced(&name, other, authors)) {
                name = renamed;
            }
        }
        match name.strip_suffix(".scale") {
            Some(layer) if is_norm(layer) => format!("{layer}.weight"),
            _ => name,
        }
    }

    /// Every name of a tensor or layer that the authors call `name`, the authors' name first.
    pub(crate) fn all(self, name: &str) -> Vec<String> {
        let mut all = vec![name.to_owned()];
        for (authors, others) in self.0 {
            for i in 0..all.len() {
                let renamed = others
                    .iter()
                    .filter_map(|other| replaced(&all[i], authors, other));
                let renamed: Vec<String> = renamed.collect();
                all.extend(renamed);
            }
        }
        for i in 0..all.len() {
            match all[i].strip_suffix(".weight") {
                Some(layer) if is_norm(layer) => all.push(format!("{layer}.scale")),
                _ => {}
            }
        }
        all
    }
}

/// Whether a layer's name is that of a norm, whose numbers programs call `weight` or `scale`.
fn is_norm(layer: &str) -> bool {
    layer.rsplit('.').next().is_some_and(|last| last.contains("norm"))
}

/// A name in which the first run of segments that matches `from` is `to` instead; `None` if none matches.
fn replaced(name: &str, from: &str, to: &str) -> Option<String> {
    let segments: Vec<&str> = name.split('.').collect();
    let pattern: Vec<&str> = from.split('.').collect();
    let matches = |run: &[&str]| {
        run.iter()
            .zip(&pattern)
            .all(|(segment, part)| *part == "*" || segment == part)
    };
    let at = segments.windows(pattern.len()).position(matches)?;
    let (before, rest) = segments.split_at(at);
    let (run, behind) = rest.split_at(pattern.len());
    let mut stars = run
        .iter()
        .zip(&pattern)
        .filter(|(_, part)| **part == "*")
        .map(|(segment, _)| *segment);
    let to = to.split('.').map(|part| match part {
        "*" => stars.next().unwrap_or(part),
        part => part,
    });
    let all: Vec<&str> = before
        .iter()
        .copied()
        .chain(to)
        .chain(behind.iter().copied())
        .collect();
    Some(all.join("."))
}

fn without_transparent(name: &str) -> String {
    let segments = name.split('.').filter(|segment| !TRANSPARENT.contains(segment));
    segments.collect::<Vec<_>>().join(".")
}

/// A name, then the name without its first prefix, then without its second, and so on. `separators` end a prefix.
pub(crate) fn unwrapped<'a>(name: &'a str, separators: &'static [char]) -> impl Iterator<Item = &'a str> {
    let wrapped = move |name: &&'a str| {
        let mut parts = WRAPPERS.iter().chain(&TRANSPARENT);
        parts.find_map(|part| name.strip_prefix(part)?.strip_prefix(separators))
    };
    std::iter::successors(Some(name), wrapped)
}

/// All prefixes that the names of a denoiser in a file may have, the shortest first.
pub(crate) fn prefixes<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let of_name = |name: &'a str| unwrapped(name, &['.']).map(|rest| &name[..name.len() - rest.len()]);
    let all: BTreeSet<&str> = names.flat_map(of_name).collect();
    let mut all: Vec<&str> = all.into_iter().collect();
    all.sort_by_key(|prefix| prefix.len());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: LayerNames = LayerNames(&[
        ("img_attn_q_norm", &["img_attn.norm.query_norm"]),
        ("q_norm", &["norm.query_norm"]),
        ("blocks.*.mlp.fc1", &["blocks.*.mlp.0"]),
    ]);

    #[test]
    fn every_name_of_a_tensor_leads_back_to_the_authors() {
        for name in [
            "double_blocks.3.img_attn_q_norm.weight",
            "single_blocks.3.q_norm.weight",
            "txt_in.blocks.11.mlp.fc1.bias",
        ] {
            let all = NAMES.all(name);
            assert!(all.len() > 1, "{all:?}");
            for other in all {
                assert_eq!(NAMES.authors(&other), name, "{other}");
            }
        }
        // Names that only look like another name.
        for same in [
            "time_in.mlp.0.weight",
            "single_blocks.3.linear1.scale",
            "a.norm.query_norms.b",
        ] {
            assert_eq!(NAMES.authors(same), same);
        }
    }

    #[test]
    fn prefixes_are_removed_one_by_one() {
        let rests: Vec<&str> = unwrapped("model.diffusion_model._orig_mod.double_blocks.0", &['.']).collect();
        assert_eq!(rests.len(), 4);
        assert_eq!(rests.last(), Some(&"double_blocks.0"));
        let names = [
            "model.diffusion_model.img_in.weight",
            "vae.decoder.conv_in.weight",
        ];
        assert_eq!(
            prefixes(names.into_iter()),
            ["", "model.", "model.diffusion_model."]
        );
        assert_eq!(
            NAMES.authors("blocks.1._orig_mod.q_norm.weight"),
            "blocks.1.q_norm.weight"
        );
    }
}
