//! Convolutions over one, two or three axes with a bias, of channels-last maps.

use super::graph::{DataType, Geometry, Graph, Pointwise};
use super::{Failure, Library, Outcome, PlanShape, Recorded};
use crate::planned::ConvolutionShape;

/// Unique ids of the tensors of a graph, used in variant packs.
pub(super) mod number {
    pub(crate) const X: i64 = 1;
    pub(crate) const FILTER: i64 = 2;
    pub(crate) const OUT: i64 = 3;
    pub(crate) const BIAS: i64 = 4;
}

/// Addresses of one convolution's operands on the card, aligned to 16 bytes. `out` overlaps none of the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvolutionAt {
    pub(crate) x: u64,
    pub(crate) filter: u64,
    pub(crate) bias: Option<u64>,
    pub(crate) out: u64,
}

impl PlanShape for ConvolutionShape {
    const NAME: &'static str = "convolution";

    /// The dtype, if cuDNN supports it and no dimension is zero.
    fn numbers(&self) -> Option<DataType> {
        let sides = [self.batch, self.channels_in, self.channels_out];
        let fits = !sides.contains(&0) && !self.spatial.contains(&0) && self.out().is_some();
        DataType::of(self.dtype).filter(|_| fits)
    }

    fn recorded(&self, everywhere: u64) -> Recorded {
        let bias = self.has_bias.then_some(number::BIAS);
        let numbers = [number::X, number::FILTER, number::OUT].into_iter().chain(bias);
        Recorded {
            at: numbers.map(|number| (number, everywhere)).collect(),
            scalars: None,
        }
    }

    /// A 1D convolution is planned as 2D with a first axis of 1: fewer engines support 1D.
    fn graph(&self, library: &'static Library, numbers: DataType) -> Outcome<Graph> {
        let written = self
            .out()
            .ok_or_else(|| Failure::ours("lists of a convolution that do not fit"))?;
        let one = self.spatial.len() == 1;
        let sides = |first: usize, of: &[usize]| -> Vec<usize> {
            let more = one.then_some(first);
            more.into_iter().chain(of.iter().copied()).collect()
        };
        let wide = |first, of: &[usize]| -> Vec<i64> {
            sides(first, of).into_iter().map(|side| side as i64).collect()
        };
        let mut graph = Graph::new(library);
        let (dims, strides) = channels_last(self.batch, self.channels_in, &sides(1, &self.spatial));
        let x = graph.on_card(number::X, numbers, &dims, &strides)?;
        let (dims, strides) = channels_last(self.channels_out, self.channels_in, &sides(1, &self.filter));
        let filter = graph.on_card(number::FILTER, numbers, &dims, &strides)?;
        let (dims, strides) = channels_last(self.batch, self.channels_out, &sides(1, &written));
        let out = graph.on_card(number::OUT, numbers, &dims, &strides)?;
        let (before, after) = (wide(0, &self.before), wide(0, &self.after));
        let (steps, dilations) = (wide(1, &self.strides), wide(1, &self.dilations));
        let geometry = Geometry {
            before: &before,
            after: &after,
            strides: &steps,
            dilations: &dilations,
        };
        if !self.has_bias {
            graph.convolution(&geometry, x, filter, out)?;
            return Ok(graph);
        }
        let sums = graph.between(DataType::F32, &dims, &strides)?;
        graph.convolution(&geometry, x, filter, sums)?;
        let (dims, strides) = channels_last(1, self.channels_out, &vec![1; sides(1, &written).len()]);
        let bias = graph.on_card(number::BIAS, numbers, &dims, &strides)?;
        graph.pointwise(Pointwise::Add, DataType::F32, sums, Some(bias), out)?;
        Ok(graph)
    }
}

/// Dimensions and strides of `[items, channels, spatial..]` in channels-last memory.
fn channels_last(items: usize, channels: usize, spatial: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let dims = [&[items, channels], spatial].concat();
    let mut strides = vec![1; dims.len()];
    let mut stride = channels;
    for axis in (2..dims.len()).rev() {
        strides[axis] = stride;
        stride *= dims[axis];
    }
    strides[0] = stride;
    (dims, strides)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn shape() -> ConvolutionShape {
        ConvolutionShape {
            batch: 1,
            spatial: vec![9, 8],
            channels_in: 4,
            channels_out: 6,
            filter: vec![3, 2],
            before: vec![0, 1],
            after: vec![1, 2],
            strides: vec![2, 1],
            dilations: vec![1, 3],
            dtype: DType::BF16,
            has_bias: true,
        }
    }

    #[test]
    fn output_dimensions_follow_from_padding_stride_and_dilation() {
        assert_eq!(shape().out(), Some(vec![4, 8]));
        for broken in [
            ConvolutionShape {
                filter: vec![3],
                ..shape()
            },
            ConvolutionShape {
                filter: vec![12, 2],
                ..shape()
            },
            ConvolutionShape {
                strides: vec![0, 1],
                ..shape()
            },
            ConvolutionShape {
                filter: vec![0, 2],
                ..shape()
            },
        ] {
            assert_eq!(broken.out(), None, "{broken:?}");
        }
    }

    #[test]
    fn maps_are_channels_last() {
        let (dims, strides) = channels_last(2, 3, &[5, 7]);
        assert_eq!((dims, strides), (vec![2, 3, 5, 7], vec![105, 1, 21, 3]));
    }
}
