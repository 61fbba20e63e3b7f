//! The layers of the vocoder with their tensors, over sequences `[time, channels]` of f32.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::{NormedWeight, RowLength, SequenceFilter, Snake};

use super::super::layers::{Outcome, Wide};
use super::COMPONENT;
use super::antialias::Antialiased;
use super::table;

/// The tensors of a component.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) tensors: &'a ComponentTensors,
    /// The dtype of convolutions.
    pub(super) dtype: DType,
}

impl Source<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Outcome<Tensor> {
        self.tensors.shaped(name, shape).map_err(missing)
    }

    /// A convolution with its bias; its weight is folded if it is stored as lengths and directions.
    pub(super) fn convolution(&self, of: &table::Convolution) -> Outcome<Wide> {
        let name = &of.name;
        let shape = of.shape_of_weight();
        let normed = format!("{name}.weight_g");
        let lengths = match self.tensors.get(&normed) {
            Ok(_) => Some(self.tensor(&normed, &[shape[0], 1, 1])?),
            Err(_) => None,
        };
        let direction = match lengths {
            Some(_) => format!("{name}.weight_v"),
            None => format!("{name}.weight"),
        };
        let direction = self.tensor(&direction, &shape)?;
        let bias = self.tensor(&format!("{name}.bias"), &[of.channels.1])?;
        let bias = ops::in_dtype(&bias, self.dtype)?;
        let weight = NormedWeight {
            direction: &direction,
            length: match &lengths {
                Some(lengths) => RowLength::Stored(lengths),
                None => RowLength::Own { gain: 1.0 },
            },
        };
        Ok(Wide {
            filter: SequenceFilter::new(weight, Some(&bias), of.shape, self.dtype)?,
            dtype: self.dtype,
        })
    }

    pub(super) fn activation(&self, name: &str, channels: usize) -> Outcome<Antialiased> {
        let vector = |which: &str| -> Outcome<Tensor> {
            let vector = self.tensor(&format!("{name}.act.{which}"), &[channels])?;
            Ok(ops::in_dtype(&vector, DType::F32)?)
        };
        Ok(Antialiased::new(Snake {
            alpha: vector("alpha")?,
            beta: vector("beta")?,
        }))
    }

    pub(super) fn stage(&self, of: &table::Stage) -> Outcome<Stage> {
        let channels = of.up.channels.1;
        let unit = |unit: &table::Unit| -> Outcome<Unit> {
            let [first, second] = &unit.activations;
            let [conv1, conv2] = &unit.convolutions;
            Ok(Unit {
                first: self.activation(first, channels)?,
                conv1: self.convolution(conv1)?,
                second: self.activation(second, channels)?,
                conv2: self.convolution(conv2)?,
            })
        };
        let block = |units: &Vec<table::Unit>| units.iter().map(unit).collect::<Outcome<_>>();
        Ok(Stage {
            up: self.convolution(&of.up)?,
            blocks: of.blocks.iter().map(block).collect::<Outcome<_>>()?,
        })
    }
}

/// The error for a tensor that is missing, or has another shape.
pub(super) fn missing(missing: gpu::MissingTensor) -> StageError {
    StageError::Missing {
        component: COMPONENT.to_owned(),
        missing,
    }
}

/// A residual unit.
#[derive(Clone, Debug)]
struct Unit {
    first: Antialiased,
    conv1: Wide,
    second: Antialiased,
    conv2: Wide,
}

/// A stage: a transposed convolution, and blocks of units whose results are averaged.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    up: Wide,
    blocks: Vec<Vec<Unit>>,
}

impl Stage {
    pub(super) fn forward(&self, x: Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        let up = self.up.run(&x, cancelled)?;
        drop(x);
        let average = Tensor::zeros(up.shape(), DType::F32, up.device())?;
        let share = 1.0 / self.blocks.len() as f64;
        for block in &self.blocks {
            let mut of_block = up.clone();
            for unit in block {
                let inner = unit.first.before(&unit.conv1, &of_block, cancelled)?;
                let sum = unit.second.before(&unit.conv2, &inner, cancelled)?;
                drop(inner);
                ops::add_rows(&of_block, &sum)?;
                of_block = sum;
            }
            ops::add_scaled(&of_block, share, &average)?;
        }
        Ok(average)
    }
}
