//! cuDNN on a card: handle, workspace, and execution.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{CudaDevice, Error, Result};
use cudarc::driver::{CudaContext, CudaStream, result};
use gpu::Timeline;

use super::attention::{Fp8Scales, Scalars, number};
use super::graph::ALIGNMENT;
use super::in_tiles::InTiles;
use super::plan::{CompileTarget, Plan};
use super::plans::Folder;
use super::{
    Ahead, AttentionAt, CodeLoader, ConvolutionAt, Failure, Library, Made, Maker, Outcome, PlanShape,
    REMEMBERED, WORKSPACE_BYTES, convolution,
};
use crate::cuda::Recorder;
use crate::planned::{AttentionShape, ConvolutionShape, MaskShape, Planned};

/// cuDNN of one card, opened at its first use.
#[derive(Default)]
pub(crate) struct OfCard(Mutex<Option<std::result::Result<Cudnn, String>>>);

impl OfCard {
    /// Runs `work` with cuDNN, or returns `None` if there is no cuDNN.
    ///
    /// # Errors
    /// Errors of `work`.
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

    /// Loads plans that are being compiled in the background, one by one, so that stages find them. For a background
    /// thread; a stage waits for one plan at most.
    pub(crate) fn take_ahead(&self, device: &CudaDevice, planned: &[Planned]) -> Result<()> {
        let mut timeline = Timeline::begin("plans taken ahead");
        let asked = self.with(device, |cudnn| {
            let key = |planned: &Planned| match planned {
                Planned::Attention(shape) => cudnn.maker.key(shape),
                Planned::Convolution(shape) => cudnn.maker.key(shape),
            };
            Ok((cudnn.ahead.clone(), planned.iter().map(key).collect::<Vec<_>>()))
        })?;
        let Some((ahead, keys)) = asked else {
            return Ok(());
        };
        for (planned, key) in planned.iter().zip(&keys) {
            let is_made = ahead.is_made(key);
            timeline.part("wait for a plan");
            if is_made {
                self.with(device, |cudnn| cudnn.take(planned))?;
                timeline.part("take a plan");
            }
        }
        timeline.end();
        Ok(())
    }
}

/// cuDNN of one context. Lives as long as the process.
pub(crate) struct Cudnn {
    handle: *mut c_void,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// [`WORKSPACE_BYTES`], never freed. Not of a pool: it belongs to the context, like cuDNN's own allocations.
    workspace: u64,
    maker: Maker,
    /// Plans compiled on threads with a handle each.
    ahead: Ahead<Maker>,
    /// Shapes requested so far.
    asked: HashSet<Planned>,
    attentions: Made<AttentionShape>,
    convolutions: Made<ConvolutionShape>,
    /// For loading the code of plans ahead of time.
    code_loader: Option<CodeLoader>,
}

// SAFETY: a handle and its plans may be used from any thread, one at a time: they are behind a mutex.
unsafe impl Send for Cudnn {}

impl Cudnn {
    /// Opens cuDNN for a card, on whose stream it works; or the reason why it is not available.
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
        // SAFETY: the handle is alive; the stream is of its context, and lives as long as the handle, beside which it
        // is stored.
        let set = unsafe { (library.set_stream)(handle, stream.cu_stream().cast()) };
        library.check(set, "cudnnSetStream").map_err(refused)?;
        // SAFETY: a workspace is written before it is read.
        let workspace = unsafe { result::malloc_sync(WORKSPACE_BYTES) }.map_err(driver)?;
        tracing::info!(version = library.version(), card, "cuDNN is open");
        library.load_parts();
        let folder = Folder::of_process();
        let maker = move |handle, code_loader| Maker {
            library,
            target: CompileTarget::Card(handle),
            card: card.clone(),
            folder: folder.clone(),
            code_loader,
        };
        let own = maker(handle, None);
        let of_threads = Arc::clone(&context);
        let open = move |idle: Option<Maker>| -> Outcome<Maker> {
            of_threads.bind_to_thread().map_err(|error| Failure {
                call: "the card's context",
                status: 5000,
                reason: error.to_string(),
            })?;
            if let Some(idle) = idle {
                return Ok(idle);
            }
            let handle = create(library)?;
            let code_loader = open_code_loader(library, &of_threads, handle, workspace).inspect_err(
                |error| tracing::debug!(%error, "the code of plans is brought when they run first"),
            );
            Ok(maker(handle, code_loader.ok()))
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
            code_loader: None,
        })
    }

    /// Takes a plan that was compiled in the background. Code that is specific to a plan is loaded for this instance
    /// again.
    fn take(&mut self, planned: &Planned) -> Result<()> {
        self.context.bind_to_thread().w()?;
        if self.code_loader.is_none() {
            let handle = create(self.maker.library).map_err(failed)?;
            self.code_loader = Some(
                open_code_loader(self.maker.library, &self.context, handle, self.workspace)
                    .map_err(failed)?,
            );
        }
        let (maker, ahead) = (&self.maker, &self.ahead);
        match planned {
            Planned::Attention(shape) => {
                if !self.attentions.has_no_place_for(shape)
                    && let Some(plan) = self.attentions.plan(maker, ahead, shape).map_err(failed)?
                    && let Some(code_loader) = &self.code_loader
                {
                    code_loader.code_of(shape, plan);
                }
            }
            // The kernels of convolutions are the library's.
            Planned::Convolution(shape) => {
                if !self.convolutions.has_no_place_for(shape) {
                    self.convolutions.plan(maker, ahead, shape).map_err(failed)?;
                }
            }
        }
        Ok(())
    }
}

/// Loads the code of plans to the card, with a handle that is used for nothing else. Captured runs get the workspace
/// as address of all tensors: nothing is computed.
fn open_code_loader(
    library: &'static Library,
    context: &Arc<CudaContext>,
    handle: *mut c_void,
    workspace: u64,
) -> Outcome<CodeLoader> {
    let recorder = Recorder::new(context).map_err(|error| Failure {
        call: "a stream that records",
        status: 5000,
        reason: error.to_string(),
    })?;
    // SAFETY: the handle is alive, and so is the stream, which lives as long as the process.
    let set = unsafe { (library.set_stream)(handle, recorder.stream().cu_stream().cast()) };
    library.check(set, "cudnnSetStream")?;
    let recorder = std::mem::ManuallyDrop::new(recorder);
    let queue = move |plan: &Plan, at: &[(i64, u64)]| {
        let mut outcome = Ok(());
        let loaded = recorder.load_queued(|| outcome = plan.run(handle, at, workspace));
        tracing::trace!(?loaded, ?outcome, "the code of a plan");
    };
    Ok(CodeLoader {
        everywhere: workspace,
        queue: Box::new(queue),
    })
}

/// A handle for the current context of this thread. Never destroyed: that would wait for the card.
fn create(library: &'static Library) -> Outcome<*mut c_void> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: the context is this thread's; the call writes one pointer.
    let created = unsafe { (library.create)(&raw mut handle) };
    library.check(created, "cudnnCreate")?;
    Ok(handle)
}

/// Requests background compilation for shapes that are not known yet, and returns those. Returns at once.
pub(crate) fn make_plans(cudnn: &mut Cudnn, planned: &[Planned]) -> Vec<Planned> {
    if cudnn.asked.len() >= REMEMBERED {
        cudnn.asked.clear();
    }
    let (asked, attentions, convolutions) = (&mut cudnn.asked, &cudnn.attentions, &cudnn.convolutions);
    let planned: Vec<Planned> = planned.iter().flat_map(|one| cudnn.maker.planned(one)).collect();
    let fresh: Vec<Planned> = planned
        .into_iter()
        .filter(|planned| {
            let is_made = match planned {
                Planned::Attention(shape) => attentions.0.contains_key(shape),
                Planned::Convolution(shape) => convolutions.0.contains_key(shape),
            };
            !is_made && asked.insert(planned.clone())
        })
        .collect();
    cudnn.ahead.ask(cudnn.maker.all_ahead(&fresh));
    fresh
}

/// Evicts a plan if the cache is full. Evicted plans may still be running, so this synchronizes.
fn make_room<S: PlanShape>(made: &mut Made<S>, shape: &S, stream: &CudaStream) -> Result<()> {
    if made.is_full_for(shape) {
        stream.synchronize().w()?;
        *made = Made::new();
    }
    Ok(())
}

fn run(plan: &Arc<Plan>, handle: *mut c_void, at: &[(i64, u64)], workspace: u64) -> Result<()> {
    debug_assert!(plan.workspace() <= WORKSPACE_BYTES);
    crate::cuda::note_plan(plan);
    plan.run(handle, at, workspace).map_err(failed)
}

/// Enqueues `softmax(q kᵀ scale, masked) v` on the card's stream. Returns `false` if cuDNN has no plan for the shape,
/// or an address is misaligned: nothing was enqueued then. The caller ensures that the addresses point to operands of
/// this shape, which live until the work on the stream is done.
///
/// # Errors
/// When the card fails; when bias or lengths are missing although the mask needs them.
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
    match (shape.log_sums, at.log_sums) {
        (true, Some(sums)) => addresses.push((number::LOG_SUMS, sums)),
        (true, None) => candle_core::bail!("attention has no place for the sums of its rows"),
        (false, _) => {}
    }
    match (shape.in_fp8, at.fp8_scales) {
        (true, Some(start)) => Fp8Scales::add_to(start, &mut addresses),
        (true, None) => candle_core::bail!("attention in e4m3 has no scales"),
        (false, _) => {}
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
    let scalars = Scalars::of(shape, at.scale);
    scalars.add_to(&mut addresses, shape);
    run(plan, cudnn.handle, &addresses, cudnn.workspace)?;
    Ok(true)
}

/// How an attention is computed in two parts; `None` where it is computed as one, or a part has no plan.
///
/// # Errors
/// When the card fails.
pub(crate) fn in_tiles(cudnn: &mut Cudnn, shape: &AttentionShape) -> Result<Option<InTiles>> {
    let Some(split) = cudnn.maker.in_tiles(shape) else {
        return Ok(None);
    };
    cudnn.context.bind_to_thread().w()?;
    for part in [&split.whole, &split.rest] {
        make_room(&mut cudnn.attentions, part, &cudnn.stream)?;
        let plan = cudnn.attentions.plan(&cudnn.maker, &cudnn.ahead, part);
        if !plan
            .map_err(failed)?
            .is_some_and(|plan| InTiles::leaves_room(plan.workspace()))
        {
            return Ok(None);
        }
    }
    Ok(Some(split))
}

/// How an attention in e4m3 is computed: the address of so many bytes for its scales, and its two parts if it has some. `None` where it
/// has no plan.
///
/// # Errors
/// When the card fails.
pub(crate) fn in_fp8(
    cudnn: &mut Cudnn,
    shape: &AttentionShape,
    bytes: usize,
) -> Result<Option<(u64, Option<InTiles>)>> {
    let split = in_tiles(cudnn, shape)?;
    if split.is_none() {
        cudnn.context.bind_to_thread().w()?;
        make_room(&mut cudnn.attentions, shape, &cudnn.stream)?;
        let plan = cudnn.attentions.plan(&cudnn.maker, &cudnn.ahead, shape);
        let plan = plan.map_err(failed)?;
        if !plan.is_some_and(|plan| InTiles::leaves_room(plan.workspace())) {
            return Ok(None);
        }
    }
    let at = InTiles::scales_at(bytes);
    Ok(at.map(|at| (cudnn.workspace + at as u64, split)))
}

/// The workspace of all plans, [`WORKSPACE_BYTES`], of which a plan has the beginning.
pub(crate) fn workspace(cudnn: &Cudnn) -> u64 {
    cudnn.workspace
}

/// Enqueues a convolution on the card's stream. Returns `false` if cuDNN has no plan for the shape, or an address is
/// misaligned: nothing was enqueued then. The caller ensures that the addresses point to operands of this shape,
/// which live until the work on the stream is done.
///
/// # Errors
/// When the card fails; when the bias is missing although the shape has one.
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

/// Whether all addresses have the alignment of plans.
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
