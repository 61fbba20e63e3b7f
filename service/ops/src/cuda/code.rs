//! Loads the code of kernels to the card before their first launch. The driver loads it lazily at the first launch,
//! for which a stage would wait, kernel by kernel; here a thread loads it while weights are loaded. Best effort: other
//! kernels are loaded at their first launch.
//!
//! The kernels that a library launches are found by stream capture (CUDA graphs): the library enqueues the work on a
//! capturing stream. Nothing runs, and no address is dereferenced.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, sys};

use super::capture::{CapturedGraph, kind_of};

/// A capturing stream.
pub(crate) struct Recorder {
    stream: Arc<CudaStream>,
}

impl Recorder {
    /// A stream of this context, independent of all others.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Recorder, DriverError> {
        let stream = context.new_stream()?;
        Ok(Recorder { stream })
    }

    /// The stream on which `queue` enqueues its work.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Loads the code of all kernels that `queue` enqueues on the stream, none of which runs. Returns their number.
    ///
    /// # Errors
    /// Errors of the driver. Errors of `queue` are not returned: the work enqueued before such an error is loaded.
    pub(crate) fn load_queued(&self, queue: impl FnOnce()) -> Result<usize, DriverError> {
        let graph = CapturedGraph::of(&self.stream, queue)?;
        let mut loaded = 0;
        for node in graph.nodes()? {
            if let Some(kernel) = kernel_of(node)? {
                // SAFETY: the function is of this context, and alive as long as the library that has it.
                unsafe { sys::cuFuncLoad(kernel) }.result()?;
                loaded += 1;
            }
        }
        Ok(loaded)
    }
}

/// The function that a kernel node launches.
fn kernel_of(node: sys::CUgraphNode) -> Result<Option<sys::CUfunction>, DriverError> {
    if kind_of(node)? != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    // SAFETY: plain data, which the call writes.
    let mut launch: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    // SAFETY: it is a kernel node; the call writes its parameters.
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

/// Loads the code of the selected functions, by name, of the module that contains `one`. Returns their number.
///
/// # Errors
/// Errors of the driver.
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
    // SAFETY: the list has this capacity.
    unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }.result()?;
    let mut loaded = 0;
    for function in functions {
        let mut name = ptr::null();
        // SAFETY: the function is of a module that is alive; the call writes one pointer.
        unsafe { sys::cuFuncGetName(&raw mut name, function) }.result()?;
        if name.is_null() {
            continue;
        }
        // SAFETY: a NUL-terminated name that lives as long as the module.
        let name = unsafe { CStr::from_ptr(name) };
        if name.to_str().is_ok_and(&is_chosen) {
            // SAFETY: as above.
            unsafe { sys::cuFuncLoad(function) }.result()?;
            loaded += 1;
        }
    }
    Ok(loaded)
}
