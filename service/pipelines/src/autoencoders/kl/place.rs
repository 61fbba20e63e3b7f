//! The place of a pipeline's autoencoder, and the check that it fits the pipeline.

use std::path::{Path, PathBuf};

use model::bounds::PIXELS_PER_TOKEN;

use super::config::VaeConfig;
use super::names::name_in_single_file;
use crate::ModelError;
use crate::autoencoders::COMPONENT;
use crate::checkpoint::{
    ComponentFiles, FilePart, Requested, VAE_IN_MODEL, companion, component_of_checkpoint,
    component_of_folder,
};
use crate::files::{check_pairs, checked};

/// A published autoencoder, which people also have as a single file without a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    /// `ae.safetensors`.
    Flux1,
    /// `flux2-vae.safetensors`.
    Flux2,
}

impl Published {
    /// The file's name without its ending.
    fn stem(self) -> &'static str {
        match self {
            Published::Flux1 => "ae",
            Published::Flux2 => "flux2-vae",
        }
    }

    fn config(self) -> VaeConfig {
        match self {
            Published::Flux1 => VaeConfig::flux(),
            Published::Flux2 => VaeConfig::flux2(),
        }
    }
}

/// The autoencoder of a pipeline: in its folder, or a file of Black Forest Labs in place of the folder.
pub(crate) struct Place {
    pub(crate) config: VaeConfig,
    folder: PathBuf,
    file: Option<FilePart>,
}

impl Place {
    /// The autoencoder of a pipeline's folder, for a transformer whose latents have `channels` channels. Where a `single` file has
    /// the transformer, the `published` autoencoder may be in it too, or, if the folder has none, in a file of its own.
    ///
    /// # Errors
    /// When there is none, or it is not supported or does not fit.
    pub(crate) fn of(
        base: &Path,
        single: Option<&Path>,
        published: Published,
        channels: usize,
    ) -> Result<Place, ModelError> {
        let folder = base.join(COMPONENT);
        let written = folder.join("config.json");
        let file = match FilePart::of_model(single, VAE_IN_MODEL)? {
            None if !folder.is_dir() => single
                .and_then(|single| companion(single, base, "vae", published.stem()))
                .map(FilePart::whole),
            own => own,
        };
        let config = match file {
            Some(_) if !written.is_file() => published.config(),
            _ => checked(&written, VaeConfig::check)?,
        };
        // FLUX.1's transformer takes two by two cells as one token, FLUX.2's a cell.
        let pixels_per_cell = match published {
            Published::Flux1 => PIXELS_PER_TOKEN as usize / 2,
            Published::Flux2 => PIXELS_PER_TOKEN as usize,
        };
        let pairs = [
            (
                "the VAE's latent channels",
                config.transformer_channels(),
                channels,
            ),
            (
                "the VAE's pixels per latent cell",
                config.transformer_factor(),
                pixels_per_cell,
            ),
            ("the VAE's channels of a picture", config.out_channels, 3),
            ("the VAE's channels of a picture to encode", config.in_channels, 3),
        ];
        check_pairs(base, &pairs)?;
        Ok(Place { config, folder, file })
    }

    /// The autoencoder's tensors.
    ///
    /// # Errors
    /// The first that is missing, of another shape, or stored in an unsupported way.
    pub(crate) fn files(&self, wanted: Requested) -> Result<ComponentFiles, ModelError> {
        let shapes = self.config.tensor_shapes();
        match &self.file {
            Some(file) => {
                let checkpoint = file.checkpoint(name_in_single_file)?;
                component_of_checkpoint(file.path(), checkpoint, wanted, |_| shapes)
            }
            None => component_of_folder(&self.folder, wanted, |_| shapes),
        }
    }
}
