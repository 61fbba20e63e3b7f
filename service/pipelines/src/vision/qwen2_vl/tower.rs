//! The computation of the tower over resident tensors.

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor};
use model::StageError;
use ops::{
    Epilogue, Mask, Nonlinearity, Norm, Pairs, QkNorm, Scratch, activate, add_residual, attention, copy_rows,
    linears_into, norm_modulate, qk_norm_rope, residual_norm_modulate,
};

use super::layout::{PATCHES, PATCHES_OF_TIMES};
use super::windows::{Run, cells_in_order, patches_of};
use super::{CELL, CHANNELS, EPS, Grid, QwenVisionConfig, THETA, TIMES};
use crate::adapters::AdaptedTensors;
use crate::linear::{Linear, largest_scratch};
use crate::rotary::{Rotations, Rounded, rotations};
use crate::text::encoding::check_finite;

fn rms(weight: &Tensor) -> Norm<'_> {
    Norm::Rms {
        weight: Some(weight),
        eps: EPS,
    }
}

/// `Qwen2_5_VLVisionBlock`.
#[derive(Clone, Debug)]
struct Block {
    norm1: Tensor,
    projections: [Linear; 3],
    out: Linear,
    norm2: Tensor,
    gate: Linear,
    raise: Linear,
    lower: Linear,
}

impl Block {
    fn new(
        tensors: &AdaptedTensors<'_>,
        number: usize,
        config: &QwenVisionConfig,
    ) -> Result<Block, MissingTensor> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let name = |part: &str| format!("blocks.{number}.{part}");
        let norm = |part: &str| tensors.shaped(&name(&format!("{part}.weight")), &[width]);
        let linear = |part: &str, from: usize, to: usize| Linear::new(tensors, &name(part), from, to);
        Ok(Block {
            norm1: norm("norm1")?,
            projections: [
                linear("attn.q", width, width)?,
                linear("attn.k", width, width)?,
                linear("attn.v", width, width)?,
            ],
            out: linear("attn.proj", width, width)?,
            norm2: norm("norm2")?,
            gate: linear("mlp.gate_proj", width, inner)?,
            raise: linear("mlp.up_proj", width, inner)?,
            lower: linear("mlp.down_proj", inner, width)?,
        })
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let others = [&self.out, &self.gate, &self.raise, &self.lower];
        self.projections.iter().chain(others)
    }

    /// Adds the block to the residual stream, whose normalized rows are ready. Then these are normalized by `next`.
    fn forward(&self, buffers: &Buffers, runs: &[Run], next: &Tensor) -> candle_core::Result<()> {
        let Buffers {
            sum,
            normed,
            joint,
            attended,
            gate,
            raised,
            rotations,
            scratch,
        } = buffers;
        let (heads, head) = (joint.dim(2)? / 3, joint.dim(3)?);
        let part = |number: usize| joint.narrow(2, number * heads, heads);
        let (query, key, value) = (part(0)?, part(1)?, part(2)?);
        let [to_query, to_key, to_value] = &self.projections;
        let layers = [to_query.to(&query)?, to_key.to(&key)?, to_value.to(&value)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        qk_norm_rope(
            &query,
            &key,
            QkNorm::None,
            Some(rotations.angles()),
            Pairs::Halves,
        )?;
        let scale = (head as f64).powf(-0.5);
        for run in runs {
            // Windows of equal size are the items of a batch.
            let rows = |x: &Tensor, heads: usize| {
                x.narrow(1, run.first, run.windows * run.patches)?.reshape((
                    run.windows,
                    run.patches,
                    heads,
                    head,
                ))
            };
            let (joint, out) = (rows(joint, 3 * heads)?, rows(attended, heads)?);
            let part = |number: usize| joint.narrow(2, number * heads, heads);
            attention(&part(0)?, &part(1)?, &part(2)?, scale, Mask::None, &out)?;
        }
        self.out.forward_into(attended, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, rms(&self.norm2), None, normed)?;
        let layers = [self.gate.to(gate)?, self.raise.to(raised)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        ops::glu(gate, raised, Nonlinearity::Silu, gate)?;
        self.lower.forward_into(gate, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, rms(next), None, normed)
    }
}

/// The first layer, over patches of `[3, patch, patch]`.
#[derive(Clone, Debug)]
enum Patches {
    /// Over both times of each channel.
    Joined(Linear),
    /// Each time by itself.
    Apart([Linear; TIMES]),
}

/// Buffers of a pass, reused by every block. The first and the last intermediate results share memory.
struct Buffers {
    /// f32 `[1, patches, width]`: the residual stream.
    sum: Tensor,
    /// `[1, patches, width]`: the normalized input of the next layers, or their output before it is added.
    normed: Tensor,
    /// `[1, patches, 3 heads, head]`: queries, keys and values.
    joint: Tensor,
    /// `[1, patches, heads, head]`.
    attended: Tensor,
    /// `[1, patches, inner]`, in the memory of `joint`.
    gate: Tensor,
    /// `[1, patches, inner]`, in the memory of `attended`.
    raised: Tensor,
    rotations: Rotations,
    scratch: Scratch,
}

impl Buffers {
    /// For patches at these rows and columns.
    fn new(
        config: &QwenVisionConfig,
        places: &[[u32; 2]],
        dtype: DType,
        scratch: Scratch,
        device: &Device,
    ) -> candle_core::Result<Buffers> {
        let (patches, width, inner) = (places.len(), config.hidden_size, config.intermediate_size);
        let (heads, head) = (config.num_heads, config.head());
        let buffer = |width: usize| Tensor::zeros(patches * width, dtype, device);
        let (first, second) = (buffer(config.first_width())?, buffer(config.second_width())?);
        let view = |of: &Tensor, width: usize| of.narrow(0, 0, patches * width);
        let half = config.head() / 2;
        Ok(Buffers {
            sum: Tensor::zeros((1, patches, width), DType::F32, device)?,
            normed: buffer(width)?.reshape((1, patches, width))?,
            joint: view(&first, 3 * width)?.reshape((1, patches, 3 * heads, head))?,
            attended: view(&second, width)?.reshape((1, patches, heads, head))?,
            gate: view(&first, inner)?.reshape((1, patches, inner))?,
            raised: view(&second, inner)?.reshape((1, patches, inner))?,
            rotations: rotations(places, [half, half], THETA, Rounded::Frequencies, device)?,
            scratch,
        })
    }
}

/// The vision tower over resident tensors.
#[derive(Debug)]
pub struct QwenVisionTower<'a> {
    config: QwenVisionConfig,
    component: String,
    tensors: &'a ComponentTensors,
    patches: Patches,
    blocks: Vec<Block>,
    /// The norm before the merger, and its layers.
    last_norm: Tensor,
    merger: [Linear; 2],
}

impl QwenVisionTower<'_> {
    /// The tower with the tensors of this component.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported tower, [`StageError::Missing`] for a tensor that is missing or not of the
    /// configuration's shape.
    pub fn new<'a>(
        config: &QwenVisionConfig,
        component: &str,
        tensors: &'a ComponentTensors,
    ) -> Result<QwenVisionTower<'a>, StageError> {
        let bad = |problem| StageError::BadInput(format!("the Qwen2.5-VL encoder has {problem}"));
        config.check().map_err(bad)?;
        let adapted = AdaptedTensors::from(tensors);
        let (width, side) = (config.hidden_size, config.patch_size);
        let read = || -> Result<_, MissingTensor> {
            let over_patches = |name: &str, patch: &[usize]| {
                let shape: Vec<usize> = std::iter::once(width).chain(patch.iter().copied()).collect();
                let weight = tensors.shaped(name, &shape)?;
                let flat = weight.reshape((width, patch.iter().product::<usize>()));
                let flat = flat.map_err(|error| MissingTensor {
                    name: name.to_owned(),
                    problem: error.to_string(),
                })?;
                Ok::<_, MissingTensor>(Linear::of(flat, None))
            };
            let patches = match tensors.contains(PATCHES_OF_TIMES[0]) {
                true => {
                    let [first, second] = PATCHES_OF_TIMES;
                    let patch = [CHANNELS, side, side];
                    Patches::Apart([over_patches(first, &patch)?, over_patches(second, &patch)?])
                }
                false => Patches::Joined(over_patches(PATCHES, &[CHANNELS, TIMES, side, side])?),
            };
            let blocks = (0..config.depth).map(|number| Block::new(&adapted, number, config));
            let merged = CELL * width;
            Ok((
                patches,
                blocks.collect::<Result<Vec<_>, _>>()?,
                tensors.shaped("merger.ln_q.weight", &[width])?,
                [
                    Linear::new(&adapted, "merger.mlp.0", merged, merged)?,
                    Linear::new(&adapted, "merger.mlp.2", merged, config.out_hidden_size)?,
                ],
            ))
        };
        let (patches, blocks, last_norm, merger) = read().map_err(StageError::missing_in(component))?;
        Ok(QwenVisionTower {
            config: config.clone(),
            component: component.to_owned(),
            tensors,
            patches,
            blocks,
            last_norm,
            merger,
        })
    }

    /// Encodes a picture of this grid, `[patches, 3 * patch * patch]` of a processor: `[grid.tokens(), out_hidden_size]` in the
    /// dtype of the weights, row by row. `cancelled` is called before every block.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for patches of another shape.
    pub fn forward(
        &self,
        patches: &Tensor,
        grid: Grid,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let config = &self.config;
        grid.check()
            .map_err(|problem| StageError::BadInput(format!("a picture of {problem}")))?;
        let expected = [grid.patches(), config.patch()];
        if patches.dims() != expected {
            let problem = format!("patches of {:?} where {expected:?} are expected", patches.dims());
            return Err(StageError::BadInput(problem));
        }
        if cancelled() {
            return Err(StageError::Cancelled);
        }
        let (device, dtype) = (self.last_norm.device(), self.last_norm.dtype());
        let order = cells_in_order(grid, config.cells_of_window());
        let linears = self.blocks.iter().flat_map(Block::linears).chain(&self.merger);
        let scratch = Scratch::new(largest_scratch(linears, grid.patches(), dtype), device)?;
        let buffers = Buffers::new(config, &patches_of(&order), dtype, scratch, device)?;
        self.embed(&in_order(patches, grid, &order)?, &buffers)?;
        norm_modulate(
            &buffers.sum,
            rms(self.blocks.first().map_or(&self.last_norm, |block| &block.norm1)),
            None,
            &buffers.normed,
        )?;
        let next = self.blocks.iter().skip(1).map(|block| &block.norm1);
        let stream = self.tensors.stream();
        for (number, (block, next)) in self.blocks.iter().zip(next.chain([&self.last_norm])).enumerate() {
            if cancelled() {
                return Err(StageError::Cancelled);
            }
            stream.enter(BlockPlace::each_pass(number))?;
            block.forward(&buffers, &config.runs_of(number, grid), next)?;
        }
        let merged = self.merge(&buffers, &order, grid)?;
        check_finite(&merged, &self.component)?;
        Ok(merged)
    }

    /// Writes the embedded patches, f32 in host memory in the order of windows, to the residual stream.
    fn embed(&self, patches: &Tensor, buffers: &Buffers) -> candle_core::Result<()> {
        let Buffers {
            sum, normed, scratch, ..
        } = buffers;
        let (count, width) = patches.dims2()?;
        let (device, dtype) = (normed.device(), normed.dtype());
        // The dtype is converted on the host, where no kernel has to be loaded for it.
        match &self.patches {
            Patches::Joined(layer) => {
                let both = (count, CHANNELS, TIMES, width / CHANNELS);
                let patches = patches.reshape((count, CHANNELS, 1, width / CHANNELS))?;
                let patches = patches.broadcast_as(both)?.reshape((1, count, TIMES * width))?;
                let patches = patches.to_dtype(dtype)?.to_device(device)?;
                layer.forward_into(&patches, Epilogue::None, normed, scratch)?;
                copy_rows(normed, sum)
            }
            Patches::Apart([first, second]) => {
                let patches = patches.reshape((1, count, width))?;
                let patches = patches.to_dtype(dtype)?.to_device(device)?;
                first.forward_into(&patches, Epilogue::None, normed, scratch)?;
                copy_rows(normed, sum)?;
                second.forward_into(&patches, Epilogue::None, normed, scratch)?;
                add_residual(sum, normed, None)
            }
        }
    }

    /// The tokens of the cells, whose patches are normalized, row by row.
    fn merge(&self, buffers: &Buffers, order: &[[usize; 2]], grid: Grid) -> candle_core::Result<Tensor> {
        let (normed, scratch) = (&buffers.normed, &buffers.scratch);
        let (device, dtype) = (normed.device(), normed.dtype());
        let (cells, merged) = (order.len(), CELL * self.config.hidden_size);
        let rows = normed.reshape((1, cells, merged))?;
        let inner = Tensor::zeros((1, cells, merged), dtype, device)?;
        let tokens = Tensor::zeros((1, cells, self.config.out_hidden_size), dtype, device)?;
        let [first, second] = &self.merger;
        first.forward_into(&rows, Epilogue::None, &inner, scratch)?;
        activate(&inner, Nonlinearity::Gelu)?;
        second.forward_into(&inner, Epilogue::None, &tokens, scratch)?;
        let [_, columns] = grid.cells();
        let mut places = vec![0u32; cells];
        for (place, [row, column]) in order.iter().enumerate() {
            places[row * columns + column] = place as u32;
        }
        let in_rows = Tensor::zeros((cells, self.config.out_hidden_size), dtype, device)?;
        ops::embed(
            &tokens.squeeze(0)?,
            &Tensor::new(places.as_slice(), device)?,
            &in_rows,
        )?;
        Ok(in_rows)
    }
}

/// The patches of a processor, which are row by row of cells, in the order of windows.
fn in_order(patches: &Tensor, grid: Grid, order: &[[usize; 2]]) -> candle_core::Result<Tensor> {
    let patches = patches.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let width = patches.dim(1)?;
    let numbers = patches.flatten_all()?.to_vec1::<f32>()?;
    let [_, columns] = grid.cells();
    let of_cell = CELL * width;
    let mut ordered = Vec::with_capacity(numbers.len());
    for [row, column] in order {
        let first = (row * columns + column) * of_cell;
        ordered.extend_from_slice(&numbers[first..first + of_cell]);
    }
    Tensor::from_vec(ordered, patches.shape(), &Device::Cpu)
}
