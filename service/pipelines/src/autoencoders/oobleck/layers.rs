//! The layers of half the autoencoder with their tensors, over sequences `[time, channels]`.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::{
    NormedWeight, Reach, RowLength, SequenceFilter, SequenceShape, Snake, Through, pad_sequence,
    snake_in_place,
};

use super::table::{Layer, dilated};
use crate::autoencoders::source::missing;

type Outcome<T> = std::result::Result<T, StageError>;

/// A [`Layer`] with its tensors.
#[derive(Clone, Debug)]
enum Loaded {
    Convolution(Option<Snake>, SequenceFilter),
    Unit(Unit),
}

/// Half the autoencoder. Weights are folded into filters when it is made.
#[derive(Clone, Debug)]
pub(super) struct Half {
    layers: Vec<Loaded>,
}

impl Half {
    /// The layers with the tensors of a component; sequences are of this dtype.
    ///
    /// # Errors
    /// [`StageError::Missing`] for a tensor that is missing or of another shape.
    pub(super) fn new(layers: &[Layer], tensors: &ComponentTensors, dtype: DType) -> Outcome<Half> {
        let source = Source { tensors, dtype };
        let load = |layer: &Layer| source.layer(layer);
        Ok(Half {
            layers: layers.iter().map(load).collect::<Outcome<_>>()?,
        })
    }

    /// A sequence through all layers.
    pub(super) fn run(&self, mut x: Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        for layer in &self.layers {
            match layer {
                Loaded::Convolution(snake, filter) => x = convolve(x, snake.as_ref(), filter, cancelled)?,
                Loaded::Unit(unit) => unit.forward(&x, cancelled)?,
            }
        }
        Ok(x)
    }
}

/// The tensors of a component, and the dtype of its layers.
#[derive(Clone, Copy)]
struct Source<'a> {
    tensors: &'a ComponentTensors,
    /// The dtype of sequences.
    dtype: DType,
}

impl Source<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Outcome<Tensor> {
        let tensor = self.tensors.shaped(name, shape).map_err(missing)?;
        Ok(ops::in_dtype(&tensor, self.dtype)?)
    }

    /// A convolution from `inputs` to `outputs` channels: those of the weight, which may be fewer than the shape's.
    fn convolution(
        &self,
        name: &str,
        shape: SequenceShape,
        (inputs, outputs): (usize, usize),
        has_bias: bool,
    ) -> Outcome<SequenceFilter> {
        let [rows, columns] = match shape.through {
            Through::Transposed { .. } => [inputs, outputs],
            Through::Dilated { .. } | Through::Strided { .. } => [outputs, inputs],
        };
        let direction = self.tensor(&format!("{name}.weight_v"), &[rows, columns, shape.taps])?;
        let length = self.tensor(&format!("{name}.weight_g"), &[rows, 1, 1])?;
        let bias = match has_bias {
            true => Some(self.tensor(&format!("{name}.bias"), &[outputs])?),
            false => None,
        };
        let weight = NormedWeight {
            direction: &direction,
            length: RowLength::Stored(&length),
        };
        Ok(SequenceFilter::new(weight, bias.as_ref(), shape, self.dtype)?)
    }

    /// A convolution whose weight has the shape's channels, and a bias.
    fn plain(&self, name: &str, shape: SequenceShape) -> Outcome<SequenceFilter> {
        self.convolution(name, shape, (shape.inputs, shape.outputs), true)
    }

    /// The vectors of an activation are `[1, c, 1]` in diffusers' files and `[c]` in others.
    fn snake(&self, name: &str, channels: usize) -> Outcome<Snake> {
        let vector = |which: &str| -> Outcome<Tensor> {
            let name = format!("{name}.{which}");
            let found = self.tensors.get(&name).map_err(missing)?;
            let shape: &[usize] = match found.dims().len() {
                1 => &[channels],
                _ => &[1, channels, 1],
            };
            Ok(self.tensor(&name, shape)?.flatten_all()?)
        };
        Ok(Snake {
            alpha: vector("alpha")?,
            beta: vector("beta")?,
        })
    }

    fn layer(&self, layer: &Layer) -> Outcome<Loaded> {
        Ok(match layer {
            Layer::Convolution {
                name,
                snake,
                shape,
                channels,
                has_bias,
            } => {
                let snake = snake.as_ref().map(|snake| self.snake(snake, channels.0));
                let filter = self.convolution(name, *shape, *channels, *has_bias)?;
                Loaded::Convolution(snake.transpose()?, filter)
            }
            Layer::Unit { name, channels, .. } => {
                let channels = *channels;
                Loaded::Unit(Unit {
                    snake1: self.snake(&format!("{name}.snake1"), channels)?,
                    conv1: self.plain(&format!("{name}.conv1"), layer.shape())?,
                    snake2: self.snake(&format!("{name}.snake2"), channels)?,
                    conv2: self.plain(&format!("{name}.conv2"), dilated(channels, channels, 1, 1))?,
                })
            }
        })
    }
}

/// A convolution of a contiguous sequence into a new one, after the activation if there is a Snake. The sequence is
/// dropped as soon as it is read.
fn convolve(
    x: Tensor,
    snake: Option<&Snake>,
    filter: &SequenceFilter,
    cancelled: &dyn Fn() -> bool,
) -> Outcome<Tensor> {
    let (rows, channels) = x.dims2()?;
    convolve_written(filter, rows, cancelled, move |reach| {
        let read = ops::blank(&[reach.read, channels], x.dtype(), x.device())?;
        pad_sequence(&x, snake, reach.before, &read)?;
        Ok(read)
    })
}

/// A convolution of a sequence of `rows` rows, which `write` makes with the rows around it that are read.
pub(in crate::autoencoders) fn convolve_written(
    filter: &SequenceFilter,
    rows: usize,
    cancelled: &dyn Fn() -> bool,
    write: impl FnOnce(Reach) -> candle_core::Result<Tensor>,
) -> Outcome<Tensor> {
    if cancelled() {
        return Err(StageError::Cancelled);
    }
    let shape = filter.shape();
    let Some(reach) = shape.reach(rows) else {
        return Err(StageError::BadInput(format!("{rows} rows by {shape:?}")));
    };
    let read = write(reach)?;
    let written = ops::blank(&[reach.written, shape.outputs], read.dtype(), read.device())?;
    filter.convolve(&read, rows, &written)?;
    Ok(written.narrow(0, reach.skipped, reach.length)?)
}

/// `OobleckResidualUnit`.
#[derive(Clone, Debug)]
struct Unit {
    snake1: Snake,
    conv1: SequenceFilter,
    snake2: Snake,
    conv2: SequenceFilter,
}

impl Unit {
    /// Runs the unit in the memory of the sequence.
    fn forward(&self, x: &Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<()> {
        let inner = convolve(x.clone(), Some(&self.snake1), &self.conv1, cancelled)?;
        snake_in_place(&inner, &self.snake2)?;
        Ok(self.conv2.add_rows_to(&inner, x)?)
    }
}
