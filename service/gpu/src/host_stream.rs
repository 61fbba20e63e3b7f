//! Components in a part on cards whose memory is the machine's: a streamed block is read from its files when a stage comes to it.
//!
//! The files stay open, so that a file that is replaced by another keeps what was opened; one that is overwritten is found out after
//! each read. A tensor of a block that is not there has no numbers: whoever reads it fails.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use residency::Part;

use crate::blocks::{BlockPlace, Placement};
use crate::convert::Numbers;
use crate::load::{LoadError, LoadPlan, TensorSource};
use crate::reader::{self, LoadedFrom, OpenFiles, Progress};
use crate::tensors::{ComponentTensors, Streams, Weight, WeightStream};

/// Reads a part of a component.
///
/// # Errors
/// As [`crate::Gpu::load`].
pub(crate) fn read_part(
    plan: &LoadPlan,
    part: Part,
    progress: Progress<'_>,
) -> Result<(ComponentTensors, LoadedFrom), LoadError> {
    let files = reader::open(plan.files()?)?;
    let from = LoadedFrom::new(plan, &files);
    let tensors = read(plan, part, &HashMap::new(), files, progress)?;
    Ok((tensors, from))
}

/// Reads another part of a component, from one to the other. What stays is not read again; after an error all is as before.
///
/// # Errors
/// As [`crate::Gpu::resize`].
pub(crate) fn resize_on_host(
    tensors: &mut Arc<ComponentTensors>,
    loaded: &LoadedFrom,
    (from, to): (Part, Part),
    progress: Progress<'_>,
) -> Result<(), LoadError> {
    let others = Arc::strong_count(tensors) - 1;
    if others > 0 {
        return Err(LoadError::StillInUse(others));
    }
    let plan = &loaded.plan;
    let sources = plan.files()?;
    let files = reader::open(sources)?;
    loaded.check_versions(&files)?;
    let stays = plan.placement(from).staying(sources);
    let weight = |tensor: usize| {
        let name = &sources[tensor].name;
        Some((name.clone(), tensors.weight(name).ok()?))
    };
    let here: HashMap<String, Weight> = stays.into_iter().filter_map(weight).collect();
    *tensors = Arc::new(read(plan, to, &here, files, progress)?);
    Ok(())
}

/// Reads a part of a component. Tensors that are `here` already are taken from there.
fn read(
    plan: &LoadPlan,
    part: Part,
    here: &HashMap<String, Weight>,
    files: OpenFiles,
    progress: Progress<'_>,
) -> Result<ComponentTensors, LoadError> {
    let sources = plan.files()?;
    let placement = plan.placement(part);
    let staying = placement.staying(sources);
    let staying = staying.into_iter().map(|tensor| &sources[tensor]);
    let (old, new): (Vec<&TensorSource>, Vec<&TensorSource>) =
        staying.partition(|source| here.contains_key(&source.name));
    let new: Vec<TensorSource> = new.into_iter().cloned().collect();
    let mut weights = reader::read_tensors(&new, progress)?;
    for source in old {
        if let Some(weight) = here.get(&source.name) {
            weights.insert(source.name.clone(), weight.clone());
        }
    }
    let stream = HostStream::of(sources, placement, files, &mut weights)?;
    Ok(ComponentTensors::of_weights(weights).streaming(stream))
}

/// The streamed blocks of a component.
#[derive(Debug)]
struct HostStream {
    blocks: HashMap<BlockPlace, Vec<(TensorSource, Tensor)>>,
    files: OpenFiles,
    /// The block that is there.
    inside: Mutex<Option<BlockPlace>>,
}

impl HostStream {
    /// The stream of a part, and tensors without numbers for its blocks. `None` if nothing is streamed.
    fn of(
        sources: &[TensorSource],
        placement: Placement,
        files: OpenFiles,
        weights: &mut HashMap<String, Weight>,
    ) -> Result<WeightStream, LoadError> {
        if placement.streamed.is_empty() {
            return Ok(WeightStream::default());
        }
        let mut blocks = HashMap::with_capacity(placement.streamed.len());
        for block in placement.streamed {
            let mut tensors = Vec::with_capacity(block.tensors.len());
            for (tensor, _) in block.tensors {
                let source = &sources[tensor];
                let empty = without_numbers(source)?;
                weights.insert(source.name.clone(), reader::weight_of(source, empty.clone()));
                tensors.push((source.clone(), empty));
            }
            blocks.insert(block.place, tensors);
        }
        Ok(WeightStream::new(Arc::new(HostStream {
            blocks,
            files,
            inside: Mutex::new(None),
        })))
    }

    fn fill(&self, tensors: &[(TensorSource, Tensor)]) -> Result<(), LoadError> {
        let sources: Vec<TensorSource> = tensors.iter().map(|(source, _)| source.clone()).collect();
        let numbers =
            reader::read_numbers(
                &sources,
                &self.files,
                &mut |_| std::ops::ControlFlow::Continue(()),
            )?;
        reader::check_unchanged(&self.files)?;
        for ((source, tensor), numbers) in tensors.iter().zip(numbers) {
            swap(tensor, numbers.into_storage(), source)?;
        }
        Ok(())
    }
}

impl Streams for HostStream {
    fn enter(&self, place: BlockPlace) -> Result<(), LoadError> {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if *inside == Some(place) {
            return Ok(());
        }
        if let Some(before) = inside.take().and_then(|before| self.blocks.get(&before)) {
            for (source, tensor) in before {
                swap(tensor, Numbers::none_of(reader::read_as(source.target)), source)?;
            }
        }
        if let Some(tensors) = self.blocks.get(&place) {
            self.fill(tensors)?;
            *inside = Some(place);
        }
        Ok(())
    }
}

/// A tensor with the shape of a source, and no numbers.
fn without_numbers(source: &TensorSource) -> Result<Tensor, LoadError> {
    let storage = Numbers::none_of(reader::read_as(source.target)).ok_or_else(|| no_form(source))?;
    let nothing = candle_core::op::BackpropOp::none();
    Ok(Tensor::from_storage(
        Storage::Cpu(storage),
        source.shape_on_card(),
        nothing,
        false,
    ))
}

fn no_form(source: &TensorSource) -> LoadError {
    LoadError::Unsupported(source.without_form())
}

/// Replaces the numbers of a tensor.
fn swap(tensor: &Tensor, numbers: Option<CpuStorage>, source: &TensorSource) -> Result<(), LoadError> {
    let numbers = numbers.ok_or_else(|| no_form(source))?;
    let swap = Swap(Mutex::new(Some(numbers)));
    tensor
        .inplace_op1(&swap)
        .map_err(|error| LoadError::Unsupported(format!("tensor {}: {error}", source.name)))
}

struct Swap(Mutex<Option<CpuStorage>>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "numbers of a streamed block"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(numbers) = numbers {
            *storage = numbers;
        }
        Ok(())
    }
}
