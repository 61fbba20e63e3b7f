//! Work that a stream captures as a CUDA graph instead of running it.

use std::ptr;

use cudarc::driver::{CudaStream, DriverError, sys};

/// A captured graph.
pub(super) struct CapturedGraph(sys::CUgraph);

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // A failure cannot be handled: it leaks some bytes on the host.
            // SAFETY: the graph is alive, and destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// A stream that captures. It stops when this is dropped, also where work on it panics.
struct Capturing<'a>(Option<&'a CudaStream>);

impl Capturing<'_> {
    fn end(mut self) -> Result<CapturedGraph, DriverError> {
        let mut graph = CapturedGraph(ptr::null_mut());
        if let Some(stream) = self.0.take() {
            // SAFETY: the stream is capturing; the call writes one pointer.
            unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph.0) }.result()?;
        }
        Ok(graph)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            let mut graph = CapturedGraph(ptr::null_mut());
            // SAFETY: as above. What was captured is dropped.
            let _ = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph.0) };
        }
    }
}

impl CapturedGraph {
    /// The work that `queue` enqueues on the stream, none of which runs. No other thread enqueues on the stream meanwhile.
    ///
    /// # Errors
    /// Errors of the driver: `queue` has asked for something that cannot be captured, such as to wait for the stream.
    pub(super) fn of(stream: &CudaStream, queue: impl FnOnce()) -> Result<CapturedGraph, DriverError> {
        stream.context().bind_to_thread()?;
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and used by this thread only.
        unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), relaxed) }.result()?;
        let capturing = Capturing(Some(stream));
        queue();
        capturing.end()
    }

    pub(super) fn raw(&self) -> sys::CUgraph {
        self.0
    }

    pub(super) fn nodes(&self) -> Result<Vec<sys::CUgraphNode>, DriverError> {
        let mut count = 0;
        // SAFETY: the graph is alive; without a list the call writes the number of nodes.
        unsafe { sys::cuGraphGetNodes(self.0, ptr::null_mut(), &raw mut count) }.result()?;
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: as above; the list has this capacity.
        unsafe { sys::cuGraphGetNodes(self.0, nodes.as_mut_ptr(), &raw mut count) }.result()?;
        nodes.truncate(count);
        Ok(nodes)
    }
}

/// The kind of a node of a graph that is alive.
pub(super) fn kind_of(node: sys::CUgraphNode) -> Result<sys::CUgraphNodeType, DriverError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node is of a graph that is alive; the call writes its kind.
    unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result()?;
    Ok(kind)
}
