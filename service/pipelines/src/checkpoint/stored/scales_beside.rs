//! fp8 weights whose scales are in another file, as Tencent publishes them: `X_fp8.pt` with codes, and `X_fp8_map.pt` with a
//! scale for each layer, by the layer's name.
//!
//! Codes without scales look like weights that were cast, which are common (`flux1-dev-fp8.safetensors`). Their size
//! distinguishes them: weights of a layer are small numbers, and codes with a scale fill the range of their type, up to 448.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use gpu::{ByteRange, Stored};

use super::{Checkpoint, LocatedTensor, SCALES, StoredAs, rename_with_parts};
use crate::checkpoint::components::open;
use crate::checkpoint::{TensorSpec, number_of};
use crate::files::{damaged, unsupported};
use crate::{ModelError, ModelFile};

/// Mean magnitude above which numbers are codes.
const LARGEST_MEAN: f64 = 2.0;

/// Number of weights that are checked, and bytes of each.
const LOOKED_AT: usize = 8;
const SAMPLE_BYTES: u64 = 4096;

impl Checkpoint {
    /// The tensors with the scales of the file `X_map.pt` beside a file `X.pt`, if there is one.
    ///
    /// # Errors
    /// When that file cannot be read.
    pub(crate) fn with_scales_beside(
        mut self,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<Checkpoint, ModelError> {
        let Some(map) = map_beside(&self.place) else {
            return Ok(self);
        };
        let file = open(&map)?;
        for (layer, entry) in file.tensors() {
            let name = rename_with_parts(&format!("{layer}{}", SCALES[0]), &rename);
            if let Some(name) = name {
                let place = LocatedTensor {
                    file: Arc::clone(file.path()),
                    entry: entry.clone(),
                };
                self.tensors.entry(name).or_insert(place);
            }
        }
        self.files.push(ModelFile::of(&file));
        Ok(self)
    }

    /// Refuses fp8 whose scales are missing.
    ///
    /// # Errors
    /// When most of the checked weights are codes.
    pub(crate) fn check_unscaled(&self, specs: &[TensorSpec]) -> Result<(), ModelError> {
        let unscaled = specs.iter().filter_map(|spec| {
            let place = self.tensors.get(&spec.tensor)?;
            let is_matrix = spec.tensor.ends_with(".weight") && spec.shape.len() > 1;
            let is_plain = || {
                let held = self.tensor(&spec.tensor).map(|stored| stored.held);
                matches!(held, Ok(StoredAs::Plain(_)))
            };
            (is_matrix && place.entry.stored == Stored::F8E4M3 && is_plain()).then_some(place)
        });
        let (mut looked_at, mut codes) = (0, 0);
        for place in unscaled.take(LOOKED_AT) {
            let mean =
                mean_magnitude(place).map_err(|e| damaged(&place.file, format!("it cannot be read: {e}")))?;
            looked_at += 1;
            codes += usize::from(mean > LARGEST_MEAN);
        }
        if 2 * codes <= looked_at {
            return Ok(());
        }
        let stem = self.place.file_stem().unwrap_or_default().display();
        Err(unsupported(
            &self.place,
            format!(
                "its weights are in fp8 with scales that are in another file, without which it makes noise: put that file \
                 beside it ({stem}_map.pt of the same repository)"
            ),
        ))
    }
}

/// The file of scales beside a file, which is named after it.
fn map_beside(file: &Path) -> Option<std::path::PathBuf> {
    let (stem, ending) = (file.file_stem()?.to_str()?, file.extension()?.to_str()?);
    let map = file.with_file_name(format!("{stem}_map.{ending}"));
    map.is_file().then_some(map)
}

/// The mean magnitude of numbers in the middle of a tensor of e4m3.
fn mean_magnitude(place: &LocatedTensor) -> std::io::Result<f64> {
    let ByteRange { offset, length } = place.entry.range;
    let count = length.min(SAMPLE_BYTES);
    let mut bytes = vec![0; count as usize];
    let mut file = gpu::open_regular(&place.file)?;
    file.seek(SeekFrom::Start(offset + (length - count) / 2))?;
    file.read_exact(&mut bytes)?;
    let numbers = bytes
        .iter()
        .filter_map(|&byte| number_of(Stored::F8E4M3, &[byte]));
    let magnitudes = numbers.filter(|number| !number.is_nan()).map(f64::abs);
    Ok(magnitudes.sum::<f64>() / count.max(1) as f64)
}
