//! [`crate::record`] on a CUDA device, by CUDA graphs.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{CudaDevice, Result, Tensor};
use cudarc::driver::{CudaStream, DriverError, sys};

use super::address_of;
use super::capture::{CapturedGraph, kind_of};
use crate::cudnn::Plan;

thread_local! {
    /// What operations use on this thread while it records.
    static NOTED: RefCell<Option<Noted>> = const { RefCell::new(None) };
}

/// What work uses.
#[derive(Default)]
struct Noted {
    /// The tensors whose addresses operations have asked for, each with its address.
    tensors: HashMap<u64, Tensor>,
    /// The plans whose kernels are enqueued.
    plans: Vec<Arc<Plan>>,
}

/// Notes that an operation uses a tensor at this address.
pub(super) fn note(x: &Tensor, address: u64) {
    NOTED.with_borrow_mut(|noted| {
        if let Some(noted) = noted {
            noted.tensors.entry(address).or_insert_with(|| x.clone());
        }
    });
}

/// Notes that an operation enqueues the kernels of a plan.
pub(crate) fn note_plan(plan: &Arc<Plan>) {
    NOTED.with_borrow_mut(|noted| {
        if let Some(noted) = noted {
            noted.plans.push(Arc::clone(plan));
        }
    });
}

/// Has this thread note what it uses, until it is dropped.
struct Noting;

impl Noting {
    fn begin() -> Noting {
        NOTED.set(Some(Noted::default()));
        Noting
    }

    fn end(self) -> Noted {
        NOTED.take().unwrap_or_default()
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        NOTED.set(None);
    }
}

/// Work of a stream, and what it uses.
pub(crate) struct Graph {
    launched: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    used: Noted,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The card may still run it.
        let waited = self.stream.synchronize();
        // SAFETY: the graph is alive, destroyed once, and not run any more.
        let destroyed = unsafe { sys::cuGraphExecDestroy(self.launched) }.result();
        if let Err(error) = waited.and(destroyed) {
            tracing::debug!(%error, "a recorded graph is not freed");
        }
    }
}

impl Graph {
    /// Captures what `queue` enqueues on the device's stream. `None` where it asks for something that is not captured, or allocates, or
    /// copies from host memory.
    pub(crate) fn of(device: &CudaDevice, queue: impl FnOnce()) -> Result<Option<Graph>> {
        let stream = device.cuda_stream();
        let noting = Noting::begin();
        let captured = CapturedGraph::of(&stream, queue);
        let used = noting.end();
        let captured = match captured {
            Ok(captured) => captured,
            Err(error) => {
                tracing::debug!(%error, "work cannot be recorded");
                // What failed while the stream captured is no error of the work that comes next.
                let _ = stream.context().check_err();
                return Ok(None);
            }
        };
        if let Some(kind) = other_than_kernels(&captured).w()? {
            tracing::debug!(?kind, "work is not recorded: it is more than kernels");
            return Ok(None);
        }
        let mut launched = ptr::null_mut();
        // SAFETY: the graph is alive; the call writes one pointer.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut launched, captured.raw(), 0) }
            .result()
            .w()?;
        Ok(Some(Graph {
            launched,
            stream,
            used,
        }))
    }

    /// Enqueues the work once more.
    pub(crate) fn run(&self) -> Result<()> {
        for (address, tensor) in &self.used.tensors {
            if address_of(tensor)? != *address {
                candle_core::bail!(
                    "recorded work uses a tensor {:?} whose memory was taken away: record it again",
                    tensor.dims()
                );
            }
        }
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: its kernels were enqueued by operations of this crate, which noted the tensors whose memory they use. These are alive
        // and where they were, and so are the plans. Workspaces of libraries live as long as the process, and all work that uses them is on this stream.
        unsafe { sys::cuGraphLaunch(self.launched, self.stream.cu_stream()) }
            .result()
            .w()
    }
}

/// The first kind of node that neither computes nor sets memory: one that allocates has memory of the graph, and one that copies may
/// read host memory that is gone.
fn other_than_kernels(
    captured: &CapturedGraph,
) -> std::result::Result<Option<sys::CUgraphNodeType>, DriverError> {
    use sys::CUgraphNodeType::{CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMSET};
    for node in captured.nodes()? {
        let kind = kind_of(node)?;
        if ![CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMSET].contains(&kind) {
            return Ok(Some(kind));
        }
    }
    Ok(None)
}
