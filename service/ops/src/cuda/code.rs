//! Code of kernels, brought to the card before they are launched. The driver brings it when a kernel is launched for the
//! first time (CUDA's lazy loading), and a stage would wait for that, kernel by kernel; a thread does it while weights are
//! loaded. It is advice: what is not brought here comes at the first launch.
//!
//! Which kernels a library launches is found by asking it for the work on a stream that only records what it is asked for
//! (capture of a CUDA graph): nothing runs, and no address is followed.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, sys};

/// A stream that records.
pub(crate) struct Recorder {
    stream: Arc<CudaStream>,
}

/// What was recorded.
struct Graph(sys::CUgraph);

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // Nobody could act on a failure: it is some bytes of the host.
            // SAFETY: it is alive, and destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

impl Recorder {
    /// A stream of this context, which no work waits for, and which waits for none.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Recorder, DriverError> {
        let stream = context.new_stream()?;
        Ok(Recorder { stream })
    }

    /// The stream that `queue` is to queue its work on.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Brings the code of all kernels that `queue` queues on the stream, none of which runs. How many those are.
    ///
    /// # Errors
    /// Those of the driver. What `queue` gives is its own to look at: where it fails, what it queued until then counts.
    pub(crate) fn load_queued(&self, queue: impl FnOnce()) -> Result<usize, DriverError> {
        self.stream.context().bind_to_thread()?;
        let raw = self.stream.cu_stream();
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and this thread's alone.
        unsafe { sys::cuStreamBeginCapture_v2(raw, relaxed) }.result()?;
        queue();
        let mut graph = Graph(ptr::null_mut());
        // SAFETY: the stream records since the call above; the call writes one pointer.
        unsafe { sys::cuStreamEndCapture(raw, &raw mut graph.0) }.result()?;
        let mut count = 0;
        // SAFETY: the graph is alive; without a list the call writes how many nodes there are.
        unsafe { sys::cuGraphGetNodes(graph.0, ptr::null_mut(), &raw mut count) }.result()?;
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: as above; the list has room for so many.
        unsafe { sys::cuGraphGetNodes(graph.0, nodes.as_mut_ptr(), &raw mut count) }.result()?;
        nodes.truncate(count);
        let mut loaded = 0;
        for node in nodes {
            if let Some(kernel) = kernel_of(node)? {
                // SAFETY: the function is of this context, and alive as long as the library that has it.
                unsafe { sys::cuFuncLoad(kernel) }.result()?;
                loaded += 1;
            }
        }
        Ok(loaded)
    }
}

/// The function of a node that launches one.
fn kernel_of(node: sys::CUgraphNode) -> Result<Option<sys::CUfunction>, DriverError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node is of a graph that is alive; the call writes its kind.
    unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result()?;
    if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    // SAFETY: plain data, which the call writes.
    let mut launch: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    // SAFETY: the node launches a kernel; the call writes what with.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(node, &raw mut launch) }.result()?;
    if !launch.func.is_null() {
        return Ok(Some(launch.func));
    }
    if launch.kern.is_null() {
        return Ok(None);
    }
    let mut function = ptr::null_mut();
    // SAFETY: the kernel is alive as long as the library that has it; the call writes its function in this context.
    unsafe { sys::cuKernelGetFunction(&raw mut function, launch.kern) }.result()?;
    Ok(Some(function))
}

/// Brings the code of those functions whose names are chosen, of the module that has this one. How many those are.
///
/// # Errors
/// Those of the driver.
pub(crate) fn load_functions(
    one: &CudaFunction,
    context: &CudaContext,
    is_chosen: impl Fn(&str) -> bool,
) -> Result<usize, DriverError> {
    context.bind_to_thread()?;
    let (mut module, mut count) = (ptr::null_mut(), 0);
    // SAFETY: the function is alive, and its module with it; the call writes one pointer.
    unsafe { sys::cuFuncGetModule(&raw mut module, one.cu_function()) }.result()?;
    // SAFETY: the module is alive; the call writes a number.
    unsafe { sys::cuModuleGetFunctionCount(&raw mut count, module) }.result()?;
    let mut functions = vec![ptr::null_mut(); count as usize];
    // SAFETY: the list has room for so many.
    unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }.result()?;
    let mut loaded = 0;
    for function in functions {
        let mut name = ptr::null();
        // SAFETY: the function is of a module that is alive; the call writes one pointer.
        unsafe { sys::cuFuncGetName(&raw mut name, function) }.result()?;
        if name.is_null() {
            continue;
        }
        // SAFETY: a name that ends with a zero, as long as the module.
        let name = unsafe { CStr::from_ptr(name) };
        if name.to_str().is_ok_and(&is_chosen) {
            // SAFETY: as above.
            unsafe { sys::cuFuncLoad(function) }.result()?;
            loaded += 1;
        }
    }
    Ok(loaded)
}
