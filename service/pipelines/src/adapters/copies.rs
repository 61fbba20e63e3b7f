//! Copies of weights with the terms of adapters: made once in a stage, instead of in every step.

use std::collections::{BTreeMap, BTreeSet};
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

impl Kind {
    /// That of the copy of a weight. `format` is that of a quantized one.
    fn of(format: Option<WeightFormat>) -> Kind {
        match format {
            Some(format) if ops::is_multiplied_in_fp8(format) => Kind::Fp8,
            Some(_) | None => Kind::Numbers,
        }
    }

    fn of_weight(weight: &Weight) -> Kind {
        match weight {
            Weight::Full(_) => Kind::of(None),
            Weight::Quantized(quantized) => Kind::of(Some(quantized.format)),
        }
    }

    /// That of the copy of a weight `[outputs, inputs]` that is kept for this many rows; `None`: none is kept.
    fn kept(format: Option<WeightFormat>, shape: [usize; 2], rows: usize) -> Option<Kind> {
        let (kind, copies) = (Kind::of(format), ops::adapter_copies());
        let shifts = format.is_some_and(|format| format.input_shift() != InputShift::None);
        // Rows are rounded for products in int8, and not for those of a copy.
        let is_int8 = format.is_some_and(|format| ops::int8_rotation(format).is_some());
        let is_asked = match copies {
            AdapterCopies::Never => false,
            AdapterCopies::Exact => kind == Kind::Numbers && !is_int8,
            AdapterCopies::Always => true,
        };
        (is_asked && !shifts && ops::adapts_weight(shape, rows)).then_some(kind)
    }
}

/// The layers of which a stage keeps copies, and their bytes.
pub(super) struct Planned {
    pub(super) layers: Vec<String>,
    pub(super) bytes: Bytes,
    /// Those of the copies in full precision, by layer: sets of adapters that share passes have no others.
    pub(super) of_numbers: BTreeMap<String, Bytes>,
}

/// The copies for these parts of adapters on a component; `rows_of` says how many rows the layer of a weight has in a step.
pub(super) fn planned<'a>(
    parts: impl Iterator<Item = &'a AdapterPart>,
    components: &ComponentSet,
    base: &str,
    rows_of: impl Fn(&str) -> usize,
    dtype: DType,
) -> Planned {
    let linear = |part: &'a AdapterPart| {
        let layers = part.scales.keys();
        let linear = layers.filter(|layer| !part.convolutions.contains_key(*layer));
        linear.map(String::as_str)
    };
    let adapted: BTreeSet<&str> = parts.flat_map(linear).collect();
    let (mut layers, mut codes, mut largest) = (Vec::new(), 0, 0);
    let mut of_numbers = BTreeMap::new();
    for source in components.sources(base) {
        let Some(layer) = source.name.strip_suffix(".weight") else {
            continue;
        };
        if !adapted.contains(layer) {
            continue;
        }
        let (outputs, inputs) = gpu::rows_and_columns(&source.shape);
        let format = match source.target {
            Target::Quantized(format) => Some(format),
            Target::Full(_) => None,
        };
        let bytes = outputs * inputs * dtype.size_in_bytes();
        match Kind::kept(format, [outputs, inputs], rows_of(&source.name)) {
            None => continue,
            Some(Kind::Numbers) => {
                of_numbers.insert(layer.to_owned(), Bytes(ops::allocated(bytes)));
            }
            Some(Kind::Fp8) => {
                codes += ops::allocated(FP8.bytes(outputs, inputs).0 as usize);
                largest = largest.max(ops::allocated(bytes));
            }
        }
        layers.push(layer.to_owned());
    }
    let numbers: Bytes = of_numbers.values().copied().sum();
    Planned {
        layers,
        bytes: numbers + Bytes(codes + largest),
        of_numbers,
    }
}

const FP8: WeightFormat = WeightFormat::Fp8(Fp8Scales::Rows);

/// The copies of one stage, or of shared passes: one of each layer for each set of adapters.
#[derive(Clone, Debug)]
pub(crate) struct Copies {
    layers: Arc<BTreeSet<String>>,
    /// Number of sets of adapters.
    sets: usize,
    /// Of those in full precision, if there are any.
    room: Option<Arc<Mutex<Room>>>,
    dtype: DType,
}

/// Memory of the copies in full precision. Those of layers that run one after the other are next to each other, so that layers over
/// the same rows are one product with copies as without; and those of one layer are at equal distances, so that items with different
/// sets have one batched product.
#[derive(Debug)]
struct Room {
    /// `[sets, numbers of a set]`.
    numbers: Tensor,
    used: usize,
}

impl Copies {
    /// Copies of these layers of a component for so many sets of adapters, in `dtype`. A CPU keeps none with the terms of adapters.
    ///
    /// # Errors
    /// When memory is exhausted.
    pub(super) fn of(
        layers: &[String],
        component: &ComponentTensors,
        sets: usize,
        (dtype, device): (DType, &Device),
    ) -> Result<Copies> {
        let named = Copies {
            layers: Arc::new(layers.iter().cloned().collect()),
            sets,
            room: None,
            dtype,
        };
        if device.is_cpu() {
            return Ok(named);
        }
        // Those of convolutions are kept by themselves.
        let weights = layers
            .iter()
            .filter_map(|layer| component.weight(&format!("{layer}.weight")).ok());
        let numbers =
            weights.filter(|weight| weight.dims().len() == 2 && Kind::of_weight(weight) == Kind::Numbers);
        let count = numbers
            .map(|weight| weight.dims().iter().product::<usize>())
            .sum();
        if count == 0 {
            return Ok(named);
        }
        let numbers = ops::blank(&[sets, count], dtype, device)?;
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
    pub(crate) fn of_layer(&self, layer: &str, weight: &Weight) -> Option<Copy> {
        if !self.has(layer) {
            return None;
        }
        let room = match (Kind::of_weight(weight), weight) {
            (Kind::Numbers, _) => Some(Arc::clone(self.room.as_ref()?)),
            (Kind::Fp8, _) if self.sets > 1 => return None,
            (Kind::Fp8, Weight::Full(_)) => return None,
            (Kind::Fp8, Weight::Quantized(quantized)) => {
                // A card without such products adds the terms in every step.
                let is_fp8 = ops::multiplies_fp8(quantized.bytes.device(), weight, self.dtype);
                is_fp8.unwrap_or(false).then_some(None)?
            }
        };
        Some(Copy {
            sets: self.sets,
            room,
            made: Arc::default(),
        })
    }
}

/// The copy of one weight for each set of adapters.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    sets: usize,
    /// Where they are written in full precision; `None` for those in fp8.
    room: Option<Arc<Mutex<Room>>>,
    made: Arc<OnceLock<Vec<Weight>>>,
}

impl Copy {
    /// The weight with the terms of a set. `layer` computes the layer with those of each set: all copies are made at the first call.
    ///
    /// # Errors
    /// When there is no such set; errors of `layer`, and of the device.
    pub(crate) fn weight<'a>(
        &self,
        set: usize,
        layer: impl Fn(usize) -> Result<LinearLayer<'a>>,
    ) -> Result<&Weight> {
        let made = match self.made.get() {
            Some(made) => made,
            None => {
                let layers = (0..self.sets).map(layer).collect::<Result<Vec<_>>>()?;
                let made = self.make(&layers)?;
                self.made.get_or_init(|| made)
            }
        };
        match made.get(set) {
            Some(weight) => Ok(weight),
            None => candle_core::bail!("no copy of a weight for set {set} of {}", self.sets),
        }
    }

    fn make(&self, layers: &[LinearLayer<'_>]) -> Result<Vec<Weight>> {
        let terms = layers.iter().flat_map(|layer| &layer.low_rank);
        let (Some(first), Some(layer)) = (terms.into_iter().next(), layers.first()) else {
            return Ok(layers.iter().map(|layer| layer.weight.clone()).collect());
        };
        let (dtype, device) = (first.down.dtype(), first.down.device());
        let (outputs, inputs) = (layer.weight.dims()[0], layer.weight.dims()[1]);
        let Some(room) = &self.room else {
            let numbers = ops::blank(&[outputs, inputs], dtype, device)?;
            ops::adapted_weight(layer, &numbers)?;
            let codes = Tensor::zeros(FP8.bytes(outputs, inputs).0 as usize, DType::U8, device)?;
            return Ok(vec![Weight::Quantized(ops::fp8_of_rows(&numbers, &codes)?)]);
        };
        let mut room = room.lock().unwrap_or_else(PoisonError::into_inner);
        let of_layer = room.numbers.narrow(1, room.used, outputs * inputs)?;
        room.used += outputs * inputs;
        let each = layers.iter().enumerate().map(|(set, layer)| {
            let numbers = of_layer.get(set)?.reshape((outputs, inputs))?;
            ops::adapted_weight(layer, &numbers)?;
            Ok(Weight::Full(numbers))
        });
        each.collect()
    }
}
