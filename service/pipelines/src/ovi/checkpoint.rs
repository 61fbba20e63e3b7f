//! Detection of Ovi checkpoints, by headers alone, and the configuration of what comes in single files.
//!
//! The fusion model is a **single file** with the transformers of the film and of the sound, as the authors publish it, or **two
//! files**, of which that of the film is opened and that of the sound lies beside it under the same name with `audio` in place of
//! `video`. All else is found as for other single files: `X.moored.json` beside the file may name it.
//!
//! | component | place |
//! |---|---|
//! | `text_encoder`, `tokenizer`, `vae` | those of Wan 2.2 TI2V 5B, as for a file of that model ([`wan::Base`]) |
//! | `audio_vae` | `v1-16.pth` or `mmaudio_vae_16k*`, beside the file, in the base, in ComfyUI's `vae`, or in `ext_weights` of MMAudio |
//! | `vocoder` | `best_netG.pt` or `mmaudio_vocoder_bigvgan*`, likewise |

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;
use serde::Deserialize;

use super::config::{BranchConfig, FusionConfig};
use super::layout::{AUDIO, GATED, VIDEO};
use super::variant::{Variant, undeclared};
use crate::autoencoders::mmaudio::MmAudioConfig;
use crate::autoencoders::mmaudio::vocoder::VocoderConfig;
use crate::checkpoint::{Checkpoint, LayerNames, beside, companion, numbered, open, prefixes, sidecar_of};
use crate::files::{damaged, incomplete, read_json, unsupported};
use crate::{ModelError, OwnLayout, wan};

/// Keys that `X.moored.json` may have in addition to `base`.
const KEYS: [&str; 3] = ["variant", "audio_vae", "vocoder"];
/// Display name of what a base is.
const BASE: &str = "Wan 2.2 TI2V 5B";
/// The module around the tables of modulations, in the authors' names.
const MODULATION: &str = "modulation";
/// A part of names that every file of a fusion model has.
const MARK: &str = ".cross_attn.k_fusion.";
/// The end of the name of the tensor that embeds patches of the film.
const EMBEDDING: &str = "patch_embedding.weight";
/// Stems of the single files of components.
const AUDIO_VAES: [&str; 2] = ["v1-16", "mmaudio_vae_16k"];
const VOCODERS: [&str; 2] = ["best_netG", "mmaudio_vocoder_bigvgan"];
/// Folders of MMAudio's own repository and of programs that keep it.
const OF_MMAUDIO: [&str; 3] = [
    "ext_weights",
    "MMAudio/ext_weights",
    "custom_nodes/ComfyUI-Ovi/ckpts/MMAudio/ext_weights",
];

/// The files of MMAudio's repository that decode the sound.
pub(super) fn own_layout(files: &[&str]) -> Option<OwnLayout> {
    let wanted = ["ext_weights/v1-16.pth", "ext_weights/best_netG.pt"];
    let has = |name: &&str| files.contains(name);
    wanted.iter().all(has).then(|| OwnLayout {
        folders: Vec::new(),
        files: wanted.map(str::to_owned).to_vec(),
        configuration: None,
    })
}

/// Whether tensors of these names are those of a fusion model, or of its film's half.
pub(super) fn is_transformer_file(names: &[&str]) -> bool {
    names.iter().any(|name| name.contains(MARK)) && !is_sound_alone(names)
}

/// Whether they are those of the sound's half alone.
fn is_sound_alone(names: &[&str]) -> bool {
    let gate = format!("patch_embedding.2.{}.weight", GATED[0]);
    let has = |part: &str| names.iter().any(|name| name.ends_with(part));
    has(&gate) && !has(EMBEDDING) && !names.iter().any(|name| name.contains(VIDEO))
}

/// What `X.moored.json` says.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Written {
    variant: Option<Variant>,
    audio_vae: Option<PathBuf>,
    vocoder: Option<PathBuf>,
}

/// The places of the parts of a model.
pub(super) struct Places {
    pub(super) variant: Variant,
    /// Where Wan's parts are.
    pub(super) base: wan::Base,
    /// The files of the fusion model, with the authors' names of tensors.
    pub(super) fusion: Vec<(PathBuf, Checkpoint)>,
    pub(super) audio_vae: PathBuf,
    pub(super) vocoder: PathBuf,
}

impl Places {
    /// The places of the model at a path; `None` if it is of another family.
    ///
    /// # Errors
    /// When it is of this family, and parts are missing or its variant is not declared.
    pub(super) fn of(path: &Path, file: Option<&CheckpointFile>) -> Result<Option<Places>, ModelError> {
        let Some(file) = file else { return Ok(None) };
        let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
        if !names.iter().any(|name| name.contains(MARK)) {
            return Ok(None);
        }
        if is_sound_alone(&names) {
            return Err(unsupported(
                path,
                "it is the half of an Ovi model that makes the sound: open the file of the film's half, beside which it is found",
            ));
        }
        let sidecar = sidecar_of(path);
        let embedding = file.tensors().find(|(name, _)| name.ends_with(EMBEDDING));
        let channels = embedding.and_then(|(_, entry)| entry.shape.get(1).copied());
        let channels = channels.ok_or_else(|| wan::no_embedding(path))?;
        let base = wan::Base::of_file(
            path,
            wan::WantedBase {
                name: BASE,
                keys: &KEYS,
                channels,
                any: true,
            },
        )?;
        let written: Written = match sidecar.is_file() {
            true => read_json(&sidecar)?,
            false => Written::default(),
        };
        let variant = variant_of(path, &written)?;
        let found = Found {
            opened: path,
            sidecar: &sidecar,
            base: &base.folder,
        };
        Ok(Some(Places {
            variant,
            audio_vae: found.part("audio_vae", written.audio_vae.as_deref(), &AUDIO_VAES)?,
            vocoder: found.part("vocoder", written.vocoder.as_deref(), &VOCODERS)?,
            fusion: fusion(path, file)?,
            base,
        }))
    }

    /// The configuration of the fusion model, from the shapes of its tensors; the width of a head is the base's.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub(super) fn fusion_config(&self) -> Result<FusionConfig, ModelError> {
        let head = self.base.transformer_config()?.attention_head_dim;
        let published = FusionConfig::default();
        let branch =
            |name: &str, embedding: &str, published: BranchConfig| -> Result<BranchConfig, ModelError> {
                let length = |tensor: &str, axis: usize| {
                    let tensor = format!("{name}.{tensor}");
                    let holds = |(_, checkpoint): &&(PathBuf, Checkpoint)| checkpoint.has(&tensor);
                    let (_, checkpoint) = self.fusion.iter().find(holds).unwrap_or(&self.fusion[0]);
                    checkpoint.length(&tensor, axis)
                };
                let dim = length("text_embedding.2.weight", 0)?;
                let channels = length(embedding, 1)?;
                let blocks = self
                    .fusion
                    .iter()
                    .map(|(_, checkpoint)| checkpoint.blocks(&format!("{name}.blocks")));
                Ok(BranchConfig {
                    dim,
                    ffn_dim: length("blocks.0.ffn.0.weight", 0)?,
                    freq_dim: length("time_embedding.0.weight", 1)?,
                    text_dim: length("text_embedding.0.weight", 1)?,
                    num_heads: dim / head.max(1),
                    num_layers: blocks.max().unwrap_or_default(),
                    in_dim: channels,
                    out_dim: channels,
                    ..published
                })
            };
        Ok(FusionConfig {
            video: branch(VIDEO, "patch_embedding.weight", published.video)?,
            audio: branch(AUDIO, "patch_embedding.0.weight", published.audio)?,
        })
    }
}

/// The variant that the sidecar declares, or else the file's name.
fn variant_of(path: &Path, written: &Written) -> Result<Variant, ModelError> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let declared = written.variant.or_else(|| Variant::of_file_name(name));
    // The authors' first file has a name that tells nothing; that of its repository, or of the folder of their download, does.
    let of_authors = || {
        let folder = path.parent().is_some_and(|folder| folder.ends_with("Ovi"));
        let is_theirs =
            folder || crate::checkpoint::of_hub_cache(path).is_some_and(|place| place.name == "Ovi");
        (is_theirs && name == "model.safetensors").then_some(Variant::Of720For5s)
    };
    declared
        .or_else(of_authors)
        .ok_or_else(|| unsupported(path, undeclared()))
}

/// The files of the fusion model: the opened one, and that of the sound where it has the film's half alone.
fn fusion(path: &Path, file: &CheckpointFile) -> Result<Vec<(PathBuf, Checkpoint)>, ModelError> {
    let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
    let has_both = names.iter().any(|name| name.contains(&format!("{AUDIO}.")));
    if has_both {
        return Ok(vec![(path.to_owned(), of_branches(file, VIDEO)?)]);
    }
    let own = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let other = path.with_file_name(own.replacen("video", "audio", 1));
    if other == path || !other.is_file() {
        return Err(incomplete(
            path,
            format!(
                "it is the half of an Ovi model that makes the film, and the half of the sound is not beside it: {} is expected",
                other.display()
            ),
        ));
    }
    Ok(vec![
        (path.to_owned(), of_branches(file, VIDEO)?),
        (other.clone(), of_branches(&open(&other)?, AUDIO)?),
    ])
}

/// A checkpoint in the authors' names. A tensor that names no branch is of `branch`, and the table of a block may be a tensor of
/// the block itself, as in Wan's files.
fn of_branches(file: &CheckpointFile, branch: &str) -> Result<Checkpoint, ModelError> {
    let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
    let is_ours = |prefix: &&str| {
        let mut rests = names.iter().filter_map(|name| name.strip_prefix(prefix));
        rests.any(|rest| branch_of(rest).is_some() || rest.starts_with("blocks."))
    };
    let prefix = prefixes(names.iter().copied())
        .into_iter()
        .find(is_ours)
        .unwrap_or("");
    let name_of = |name: &str| {
        let name = LayerNames(&[]).authors(name.strip_prefix(prefix)?);
        let (branch, within) = branch_of(&name).unwrap_or((branch, &name));
        Some(match (within, numbered(within, "blocks.")) {
            // It marks the whole file.
            ("scaled_fp8", _) => name.clone(),
            (_, Some((_, MODULATION))) => format!("{branch}.{within}.{MODULATION}"),
            _ => format!("{branch}.{within}"),
        })
    };
    Checkpoint::of_file(file, name_of)?.with_scales_beside(name_of)
}

/// The branch that a tensor's name begins with, and the rest of the name.
fn branch_of(name: &str) -> Option<(&'static str, &str)> {
    [VIDEO, AUDIO]
        .into_iter()
        .find_map(|branch| Some((branch, name.strip_prefix(branch)?.strip_prefix('.')?)))
}

/// Where the parts of a model are searched.
struct Found<'a> {
    opened: &'a Path,
    sidecar: &'a Path,
    base: &'a Path,
}

impl Found<'_> {
    /// The file of a part of the sound's decoder: the one that is named, or the only one with one of these names.
    fn part(&self, key: &str, named: Option<&Path>, stems: &[&str]) -> Result<PathBuf, ModelError> {
        if let Some(named) = named {
            let path = self.sidecar.parent().unwrap_or(Path::new(".")).join(named);
            return match path.is_file() {
                true => Ok(path),
                false => Err(damaged(
                    self.sidecar,
                    format!("its {key} {} is no file", path.display()),
                )),
            };
        }
        let here = stems
            .iter()
            .find_map(|stem| companion(self.opened, self.base, "vae", stem));
        let in_mmaudio = || {
            let around = self.opened.ancestors().skip(1).take(3).map(Path::to_owned);
            let folders = around.chain(beside(self.opened).unwrap_or_default());
            let folders = folders.flat_map(|folder| OF_MMAUDIO.map(|of| folder.join(of)));
            folders.filter(|folder| folder.is_dir()).find_map(|folder| {
                stems
                    .iter()
                    .find_map(|stem| companion(&folder.join("x"), &folder, "", stem))
            })
        };
        here.or_else(in_mmaudio).ok_or_else(|| {
            incomplete(
                self.opened,
                format!(
                    "its sound is decoded by MMAudio, and {} is not found: download {0}.pth or {0}.pt of hkchengrex/MMAudio \
                     (ext_weights) and put it beside the model, or name it in {} as {key}",
                    stems[0],
                    self.sidecar.display()
                ),
            )
        })
    }
}

/// The audio VAE in a file: its tensors under the authors' names, and its configuration.
///
/// # Errors
/// When it is no such file.
pub(super) fn audio_vae(path: &Path) -> Result<(MmAudioConfig, Checkpoint), ModelError> {
    let file = open(path)?;
    let is_of_diffusers = file.tensors().any(|(name, _)| name.starts_with("vae.decoder."));
    let name_of = |name: &str| {
        let name = name.strip_prefix("vae.").unwrap_or(name);
        let is_read = name.starts_with("decoder.") || name.starts_with("data_");
        is_read.then(|| name.to_owned())
    };
    let checkpoint = Checkpoint::of_file(&file, name_of)?;
    let is_it = checkpoint.has("decoder.conv_in.weight") && checkpoint.has("data_mean");
    if !is_it {
        return Err(unsupported(
            path,
            "it is no audio VAE of MMAudio, as v1-16.pth is",
        ));
    }
    let length = |name: &str, axis: usize| checkpoint.length(name, axis);
    let levels = checkpoint.blocks("decoder.up");
    let hidden = length("decoder.conv_out.weight", 1)?.max(1);
    let multipliers =
        (0..levels).map(|level| Ok(length(&format!("decoder.up.{level}.block.0.conv1.weight"), 0)? / hidden));
    let config = MmAudioConfig {
        mel_bins: length("data_mean", 1)?,
        latent_channels: length("decoder.conv_in.weight", 1)?,
        hidden_channels: hidden,
        channel_multipliers: multipliers.collect::<Result<_, ModelError>>()?,
        layers_per_block: checkpoint.blocks("decoder.up.0.block").saturating_sub(1),
        has_normalised_weights: is_of_diffusers,
    };
    config.check().map_err(|problem| unsupported(path, problem))?;
    Ok((config, checkpoint))
}

/// The vocoder in a file.
///
/// # Errors
/// When it is no such file.
pub(super) fn vocoder(path: &Path) -> Result<(VocoderConfig, Checkpoint), ModelError> {
    use crate::autoencoders::mmaudio::vocoder::vocoder_name;
    let checkpoint = Checkpoint::of_file(&open(path)?, vocoder_name)?;
    let weight = |name: String| match checkpoint.has(&format!("{name}.weight_v")) {
        true => format!("{name}.weight_v"),
        false => format!("{name}.weight"),
    };
    if !checkpoint.has(&weight("conv_pre".to_owned())) {
        return Err(unsupported(
            path,
            "it is no vocoder of MMAudio, as best_netG.pt is",
        ));
    }
    let length = |name: String, axis: usize| checkpoint.length(&weight(name), axis);
    let stages = checkpoint.blocks("ups");
    let blocks = checkpoint.blocks("resblocks") / stages.max(1);
    let taps = (0..stages).map(|stage| length(format!("ups.{stage}.0"), 2));
    let taps: Vec<usize> = taps.collect::<Result<_, ModelError>>()?;
    let kernels = (0..blocks).map(|block| length(format!("resblocks.{block}.convs1.0"), 2));
    let published = VocoderConfig::default();
    let config = VocoderConfig {
        num_mels: length("conv_pre".to_owned(), 1)?,
        upsample_initial_channel: length("conv_pre".to_owned(), 0)?,
        upsample_rates: taps.iter().map(|taps| taps / 2).collect(),
        upsample_kernel_sizes: taps,
        resblock_kernel_sizes: kernels.collect::<Result<_, ModelError>>()?,
        // No tensor shows them.
        resblock_dilation_sizes: published
            .resblock_dilation_sizes
            .into_iter()
            .take(blocks)
            .collect(),
    };
    config.check().map_err(|problem| unsupported(path, problem))?;
    Ok((config, checkpoint))
}
