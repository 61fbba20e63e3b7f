//! Copies of weights with the terms of adapters: made once in a stage, instead of in every step.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use gpu::{ComponentTensors, Fp8Scales, InputShift, Target, Weight, WeightFormat};
use model::ComponentSet;
use ops::{AdapterCopies, LinearLayer};
use residency::Bytes;

use super::open::AdapterPart;

/// The representation of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// In the dtype of the rows.
    Numbers,
    /// In fp8 with a scale a row.
    Fp8,
}

/// The representation of the copy of a weight `[outputs, inputs]` for this many rows; `None`: there is none. `format` is that of a
/// quantized weight.
fn kind_of(
    format: Option<WeightFormat>,
    shape: [usize; 2],
    rows: usize,
    copies: AdapterCopies,
) -> Option<Kind> {
    if copies == AdapterCopies::Never || !ops::adapts_weight(shape, rows) {
        return None;
    }
    match format {
        None => Some(Kind::Numbers),
        Some(format) if format.input_shift() != InputShift::None => None,
        Some(format) if !ops::is_multiplied_in_fp8(format) => Some(Kind::Numbers),
        Some(_) if copies == AdapterCopies::Always => Some(Kind::Fp8),
        Some(_) => None,
    }
}

/// The layers of which a stage keeps copies, and their bytes.
pub(super) struct Planned {
    pub(super) layers: Vec<String>,
    pub(super) bytes: Bytes,
}

/// The copies for these parts of adapters on a component; `rows_of` says how many rows the layer of a weight has in a step.
pub(super) fn planned<'a>(
    parts: impl Iterator<Item = &'a AdapterPart>,
    components: &ComponentSet,
    base: &str,
    rows_of: impl Fn(&str) -> usize,
    dtype: DType,
) -> Planned {
    let copies = ops::adapter_copies();
    let linear = |part: &'a AdapterPart| {
        let layers = part.scales.keys();
        layers.filter(|layer| !part.convolutions.contains_key(*layer))
    };
    let adapted: BTreeSet<&String> = parts.flat_map(linear).collect();
    let (mut layers, mut numbers, mut codes, mut largest) = (Vec::new(), 0, 0, 0);
    for source in components.sources(base) {
        let Some(layer) = source.name.strip_suffix(".weight") else {
            continue;
        };
        if !adapted.contains(&layer.to_owned()) {
            continue;
        }
        let (outputs, inputs) = gpu::rows_and_columns(&source.shape);
        let format = match source.target {
            Target::Quantized(format) => Some(format),
            Target::Full(_) => None,
        };
        let bytes = outputs * inputs * dtype.size_in_bytes();
        match kind_of(format, [outputs, inputs], rows_of(&source.name), copies) {
            None => continue,
            Some(Kind::Numbers) => numbers += bytes,
            Some(Kind::Fp8) => {
                codes += ops::allocated(FP8.bytes(outputs, inputs).0 as usize);
                largest = largest.max(ops::allocated(bytes));
            }
        }
        layers.push(layer.to_owned());
    }
    Planned {
        layers,
        bytes: Bytes(ops::allocated(numbers) + codes + largest),
    }
}

const FP8: WeightFormat = WeightFormat::Fp8(Fp8Scales::Rows);

/// The copies of one stage.
#[derive(Clone, Default)]
pub(crate) struct Copies {
    layers: Arc<BTreeSet<String>>,
    room: Option<Arc<Mutex<Room>>>,
}

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.room.is_none() {
            "fp8"
        } else {
            "full precision"
        };
        write!(f, "a copy in {kind}")
    }
}

/// Memory of the copies in full precision: those of layers that run one after the other are next to each other, so that layers over
/// the same rows are one product with copies as without.
struct Room {
    numbers: Tensor,
    used: usize,
}

impl Copies {
    /// Copies of these layers of a component, in `dtype`. A CPU keeps none with the terms of adapters.
    ///
    /// # Errors
    /// When memory is exhausted.
    pub(super) fn of(
        layers: &[String],
        component: &ComponentTensors,
        (dtype, device): (DType, &Device),
    ) -> Result<Copies> {
        let named = Copies {
            layers: Arc::new(layers.iter().cloned().collect()),
            room: None,
        };
        if device.is_cpu() {
            return Ok(named);
        }
        let mut count = 0;
        for layer in layers {
            match component.weight(&format!("{layer}.weight")) {
                Ok(weight) if weight.dims().len() > 2 => {} // of a convolution, which keeps it
                Ok(Weight::Full(weight)) => count += weight.elem_count(),
                Ok(Weight::Quantized(weight)) if !ops::is_multiplied_in_fp8(weight.format) => {
                    count += weight.shape.iter().product::<usize>();
                }
                Ok(Weight::Quantized(_)) | Err(_) => {}
            }
        }
        if count == 0 {
            return Ok(named);
        }
        let numbers = ops::blank(&[count], dtype, device)?;
        Ok(Copies {
            room: Some(Arc::new(Mutex::new(Room { numbers, used: 0 }))),
            ..named
        })
    }

    /// Whether a copy of a layer's weight is kept.
    pub(crate) fn has(&self, layer: &str) -> bool {
        self.layers.contains(layer)
    }

    /// The copy of a layer's weight, if one is kept. It is made when the layer is first used.
    pub(crate) fn of_layer(&self, layer: &str, weight: &Weight, dtype: DType) -> Option<Copy> {
        if !self.has(layer) {
            return None;
        }
        let room = match weight {
            Weight::Quantized(quantized) if ops::is_multiplied_in_fp8(quantized.format) => {
                // A card without such products adds the terms in every step.
                let is_fp8 = ops::multiplies_fp8(quantized.bytes.device(), weight, dtype);
                is_fp8.unwrap_or(false).then_some(None)?
            }
            Weight::Full(_) | Weight::Quantized(_) => Some(Arc::clone(self.room.as_ref()?)),
        };
        Some(Copy {
            room,
            made: Arc::default(),
        })
    }
}

/// The copy of one weight.
#[derive(Clone)]
pub(crate) struct Copy {
    /// Where it is written in full precision; `None` for one in fp8.
    room: Option<Arc<Mutex<Room>>>,
    made: Arc<OnceLock<Weight>>,
}

impl fmt::Debug for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.room.is_none() {
            "fp8"
        } else {
            "full precision"
        };
        write!(f, "a copy in {kind}")
    }
}

impl Copy {
    /// The weight with the terms of `layer`, which computes it; made at the first call.
    ///
    /// # Errors
    /// Errors of `layer`, and of the device.
    pub(crate) fn weight<'a>(&self, layer: impl FnOnce() -> Result<LinearLayer<'a>>) -> Result<&Weight> {
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        let made = self.make(&layer()?)?;
        Ok(self.made.get_or_init(|| made))
    }

    fn make(&self, layer: &LinearLayer<'_>) -> Result<Weight> {
        let Some(first) = layer.low_rank.first() else {
            return Ok(layer.weight.clone());
        };
        let (dtype, device) = (first.down.dtype(), first.down.device());
        let (outputs, inputs) = (layer.weight.dims()[0], layer.weight.dims()[1]);
        let Some(room) = &self.room else {
            let numbers = ops::blank(&[outputs, inputs], dtype, device)?;
            ops::adapted_weight(layer, &numbers)?;
            let codes = Tensor::zeros(FP8.bytes(outputs, inputs).0 as usize, DType::U8, device)?;
            return Ok(Weight::Quantized(ops::fp8_of_rows(&numbers, &codes)?));
        };
        let mut room = room.lock().unwrap_or_else(PoisonError::into_inner);
        let numbers = room.numbers.narrow(0, room.used, outputs * inputs)?;
        room.used += outputs * inputs;
        let numbers = numbers.reshape((outputs, inputs))?;
        ops::adapted_weight(layer, &numbers)?;
        Ok(Weight::Full(numbers))
    }
}
