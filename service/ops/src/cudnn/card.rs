//! cuDNN on a card: its handle, its workspace, and runs.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{CudaDevice, Error, Result};
use cudarc::driver::{CudaContext, CudaStream, result};

use super::attention::number;
use super::graph::ALIGNMENT;
use super::plan::{Plan, Target};
use super::plans::Folder;
use super::{
    Ahead, AttentionAt, ConvolutionAt, Failure, Library, Made, Maker, Outcome, REMEMBERED, Shape,
    WORKSPACE_BYTES, convolution,
};
use crate::planned::{AttentionShape, ConvolutionShape, MaskShape, Planned};

/// cuDNN of one card, opened when it is first asked for.
#[derive(Default)]
pub(crate) struct OfCard(Mutex<Option<std::result::Result<Cudnn, String>>>);

impl OfCard {
    /// What `work` makes of it, or `None` where there is no cuDNN.
    ///
    /// # Errors
    /// Those of the work.
    pub(crate) fn with<R>(
        &self,
        device: &CudaDevice,
        work: impl FnOnce(&mut Cudnn) -> Result<R>,
    ) -> Result<Option<R>> {
        let mut opened = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = opened.get_or_insert_with(|| {
            Cudnn::open(device)
                .inspect_err(|reason| tracing::info!(reason, "there is no cuDNN: other kernels compute"))
        });
        opened.as_mut().ok().map(work).transpose()
    }
}

/// cuDNN of one context. It lives as long as the process.
pub(crate) struct Cudnn {
    handle: *mut c_void,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Of [`WORKSPACE_BYTES`], never freed. It is none of a pool's: it belongs to the context, as what cuDNN itself
    /// allocates does.
    workspace: u64,
    maker: Maker,
    /// Plans that threads make, each with a handle of its own.
    ahead: Ahead<Maker>,
    /// What they were asked for.
    asked: HashSet<Planned>,
    attentions: Made<AttentionShape>,
    convolutions: Made<ConvolutionShape>,
}

// SAFETY: a handle and its plans may be used from any thread, one at a time: they are behind a mutex.
unsafe impl Send for Cudnn {}

impl Cudnn {
    /// cuDNN for a card, whose stream it uses; or why there is none.
    fn open(device: &CudaDevice) -> std::result::Result<Cudnn, String> {
        let library = Library::get().map_err(str::to_owned)?;
        let stream = device.cuda_stream();
        let context = Arc::clone(stream.context());
        let driver = |error: result::DriverError| error.to_string();
        let refused = |failure: Failure| failure.to_string();
        context.bind_to_thread().map_err(driver)?;
        let (major, minor) = context.compute_capability().map_err(driver)?;
        let card = format!("sm_{major}{minor} {}", context.name().map_err(driver)?);
        let handle = create(library).map_err(refused)?;
        // SAFETY: the handle is alive, and the stream is of its context and lives as long as it, which is kept beside it.
        let set = unsafe { (library.set_stream)(handle, stream.cu_stream().cast()) };
        library.check(set, "cudnnSetStream").map_err(refused)?;
        // SAFETY: a workspace is written before it is read.
        let workspace = unsafe { result::malloc_sync(WORKSPACE_BYTES) }.map_err(driver)?;
        tracing::info!(version = library.version(), card, "cuDNN is open");
        library.load_parts();
        let folder = Folder::of_process();
        let maker = move |handle| Maker {
            library,
            target: Target::Card(handle),
            card: card.clone(),
            folder: folder.clone(),
        };
        let own = maker(handle);
        let of_threads = Arc::clone(&context);
        let open = move |idle: Option<Maker>| -> Outcome<Maker> {
            of_threads.bind_to_thread().map_err(|error| Failure {
                call: "the card's context",
                status: 5000,
                reason: error.to_string(),
            })?;
            idle.map_or_else(|| create(library).map(&maker), Ok)
        };
        Ok(Cudnn {
            handle,
            context,
            stream,
            workspace,
            maker: own,
            ahead: Ahead::new(Box::new(open)),
            asked: HashSet::new(),
            attentions: Made::new(),
            convolutions: Made::new(),
        })
    }
}

/// A handle for the context of this thread. It is never destroyed: that would wait for the card.
fn create(library: &'static Library) -> Outcome<*mut c_void> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: the context is this thread's; the call writes one pointer.
    let created = unsafe { (library.create)(&raw mut handle) };
    library.check(created, "cudnnCreate")?;
    Ok(handle)
}

/// Has plans made ahead for shapes that are not known yet. Returns at once.
pub(crate) fn make_plans(cudnn: &mut Cudnn, planned: &[Planned]) {
    if cudnn.asked.len() >= REMEMBERED {
        cudnn.asked.clear();
    }
    let (asked, attentions, convolutions) = (&mut cudnn.asked, &cudnn.attentions, &cudnn.convolutions);
    let fresh: Vec<Planned> = planned
        .iter()
        .filter(|planned| {
            let is_made = match planned {
                Planned::Attention(shape) => attentions.0.contains_key(shape),
                Planned::Convolution(shape) => convolutions.0.contains_key(shape),
            };
            !is_made && asked.insert((*planned).clone())
        })
        .cloned()
        .collect();
    cudnn.ahead.ask(cudnn.maker.all_ahead(&fresh));
}

/// Makes room for a plan. What is forgotten may still be running.
fn make_room<S: Shape>(made: &mut Made<S>, shape: &S, stream: &CudaStream) -> Result<()> {
    if made.is_full_for(shape) {
        stream.synchronize().w()?;
        *made = Made::new();
    }
    Ok(())
}

fn run(plan: &Plan, handle: *mut c_void, at: &[(i64, u64)], workspace: u64) -> Result<()> {
    debug_assert!(plan.workspace() <= WORKSPACE_BYTES);
    plan.run(handle, at, workspace).map_err(failed)
}

/// Queues `softmax(q kᵀ scale, masked) v` on the card's stream. `false` where cuDNN has no plan for the shape, or an
/// address is not aligned: nothing was queued then. The caller sees to it that the addresses lead to what the shape says,
/// and that it lives until the stream has come past it.
///
/// # Errors
/// When the card fails; when bias or lengths are not given where the mask asks for them.
pub(crate) fn attention(cudnn: &mut Cudnn, shape: &AttentionShape, at: &AttentionAt) -> Result<bool> {
    let mut addresses = vec![
        (number::Q, at.q),
        (number::K, at.k),
        (number::V, at.v),
        (number::OUT, at.out),
    ];
    match (&shape.mask, at.bias, at.lengths) {
        (MaskShape::Bias { .. }, Some(bias), _) => addresses.push((number::BIAS, bias)),
        (MaskShape::Lengths, _, Some((queries, keys))) => {
            addresses.extend([(number::QUERIES, queries), (number::KEYS, keys)]);
        }
        (MaskShape::Bias { .. } | MaskShape::Lengths, _, _) => {
            candle_core::bail!(
                "attention has neither the bias nor the lengths of its mask {:?}",
                shape.mask
            )
        }
        (MaskShape::None | MaskShape::Causal | MaskShape::Window { .. }, _, _) => {}
    }
    if !aligned(&addresses) {
        return Ok(false);
    }
    cudnn.context.bind_to_thread().w()?;
    make_room(&mut cudnn.attentions, shape, &cudnn.stream)?;
    let plan = cudnn.attentions.plan(&cudnn.maker, &cudnn.ahead, shape);
    let Some(plan) = plan.map_err(failed)? else {
        return Ok(false);
    };
    // Scalars are read from here while the run is queued.
    let hidden = f32::NEG_INFINITY;
    let (before, after) = shape.reach();
    let before_and_itself = before.map_or(0, |before| before as i32 + 1);
    let beyond = after.map_or(0, |after| after as i32);
    addresses.push((number::SCALE, (&raw const at.scale) as u64));
    if before.is_some() || after.is_some() || shape.mask == MaskShape::Lengths {
        addresses.push((number::HIDDEN, (&raw const hidden) as u64));
    }
    if before.is_some() {
        addresses.push((number::BEFORE, (&raw const before_and_itself) as u64));
    }
    if after.is_some_and(|after| after > 0) {
        addresses.push((number::AFTER, (&raw const beyond) as u64));
    }
    run(plan, cudnn.handle, &addresses, cudnn.workspace)?;
    Ok(true)
}

/// Queues a convolution on the card's stream. `false` where cuDNN has no plan for the shape, or an address is not
/// aligned: nothing was queued then. The caller sees to it that the addresses lead to what the shape says, and that it
/// lives until the stream has come past it.
///
/// # Errors
/// When the card fails; when there is no bias where the shape has one.
pub(crate) fn convolve(cudnn: &mut Cudnn, shape: &ConvolutionShape, at: &ConvolutionAt) -> Result<bool> {
    use convolution::number;
    let mut addresses = vec![
        (number::X, at.x),
        (number::FILTER, at.filter),
        (number::OUT, at.out),
    ];
    match (shape.has_bias, at.bias) {
        (true, Some(bias)) => addresses.push((number::BIAS, bias)),
        (true, None) => candle_core::bail!("a convolution has not the bias that its shape has"),
        (false, _) => {}
    }
    if !aligned(&addresses) {
        return Ok(false);
    }
    cudnn.context.bind_to_thread().w()?;
    make_room(&mut cudnn.convolutions, shape, &cudnn.stream)?;
    let plan = cudnn.convolutions.plan(&cudnn.maker, &cudnn.ahead, shape);
    let Some(plan) = plan.map_err(failed)? else {
        return Ok(false);
    };
    run(plan, cudnn.handle, &addresses, cudnn.workspace)?;
    Ok(true)
}

/// Whether all addresses are aligned as plans are told.
fn aligned(addresses: &[(i64, u64)]) -> bool {
    addresses
        .iter()
        .all(|(_, address)| address.is_multiple_of(ALIGNMENT))
}

fn failed(failure: Failure) -> Error {
    Error::Msg(failure.to_string())
}

#[cfg(test)]
mod tests;
