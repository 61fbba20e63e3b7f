//! The dozen functions of cuDNN that are called, loaded at their first use. Nothing is linked: without cuDNN the
//! program starts and uses other kernels.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use gpu::Timeline;

use super::{Failure, Outcome};

/// Name for the dynamic loader, which searches `LD_LIBRARY_PATH`, then the program's rpath.
pub(super) const FILE: &str = "libcudnn.so.9";

/// Sublibraries that cuDNN loads lazily, at 30 to 100 ms each.
#[cfg(feature = "cuda")]
const PARTS: [&str; 5] = [
    "libcudnn_graph.so.9",
    "libcudnn_heuristic.so.9",
    "libcudnn_engines_precompiled.so.9",
    "libcudnn_engines_runtime_compiled.so.9",
    "libcudnn_engines_tensor_ir.so.9",
];

/// The oldest version with which the graphs were tested.
const SINCE: usize = 91301;

/// Buffer size for error messages.
const REASON_BYTES: usize = 1024;

type Create = unsafe extern "C" fn(*mut *mut c_void) -> i32;
type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> i32;
type Version = unsafe extern "C" fn() -> usize;
type LastError = unsafe extern "C" fn(*mut c_char, usize);
type CreateDescriptor = unsafe extern "C" fn(i32, *mut *mut c_void) -> i32;
type OfDescriptor = unsafe extern "C" fn(*mut c_void) -> i32;
type SetAttribute = unsafe extern "C" fn(*mut c_void, i32, i32, i64, *const c_void) -> i32;
type GetAttribute = unsafe extern "C" fn(*mut c_void, i32, i32, i64, *mut i64, *mut c_void) -> i32;
type Execute = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> i32;

/// cuDNN's functions. Statuses are plain numbers, since later versions add values.
pub(crate) struct Library {
    version: usize,
    pub(super) create: Create,
    pub(super) set_stream: SetStream,
    pub(super) create_descriptor: CreateDescriptor,
    pub(super) destroy_descriptor: OfDescriptor,
    pub(super) set_attribute: SetAttribute,
    pub(super) get_attribute: GetAttribute,
    pub(super) finalize: OfDescriptor,
    pub(super) execute: Execute,
    last_error: LastError,
    /// Keeps the library loaded.
    _loaded: libloading::Library,
}

impl Library {
    /// The library of this process, or why it is not available. Loaded once.
    pub(crate) fn get() -> Result<&'static Library, &'static str> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY
            .get_or_init(|| Library::open(FILE))
            .as_ref()
            .map_err(String::as_str)
    }

    /// Loads a library file.
    pub(super) fn open(file: &str) -> Result<Library, String> {
        // SAFETY: the file is NVIDIA's library, or one that the operator put in its place; its initializers have no
        // preconditions.
        let loaded = unsafe { libloading::Library::new(file) }
            .map_err(|error| format!("{file} cannot be loaded: {error}"))?;
        macro_rules! function {
            ($name:literal as $kind:ty) => {
                // SAFETY: the function has this type in every version 9 of cuDNN, and is not called after the library
                // is unloaded, since that is stored beside it.
                *unsafe { loaded.get::<$kind>($name) }
                    .map_err(|error| format!("{file} has no {}: {error}", $name))?
            };
        }
        let version: Version = function!("cudnnGetVersion" as Version);
        // SAFETY: it takes nothing and returns a number.
        let version = unsafe { version() };
        if version < SINCE {
            return Err(format!(
                "cuDNN {} is too old: {} is the oldest that is used",
                version_text(version),
                version_text(SINCE)
            ));
        }
        Ok(Library {
            version,
            create: function!("cudnnCreate" as Create),
            set_stream: function!("cudnnSetStream" as SetStream),
            create_descriptor: function!("cudnnBackendCreateDescriptor" as CreateDescriptor),
            destroy_descriptor: function!("cudnnBackendDestroyDescriptor" as OfDescriptor),
            set_attribute: function!("cudnnBackendSetAttribute" as SetAttribute),
            get_attribute: function!("cudnnBackendGetAttribute" as GetAttribute),
            finalize: function!("cudnnBackendFinalize" as OfDescriptor),
            execute: function!("cudnnBackendExecute" as Execute),
            last_error: function!("cudnnGetLastErrorString" as LastError),
            _loaded: loaded,
        })
    }

    /// Loads cuDNN's sublibraries now, on a background thread. A missing one (versions differ) is left to cuDNN.
    #[cfg(feature = "cuda")]
    pub(super) fn load_parts(&self) {
        let load = || {
            let mut timeline = Timeline::begin("load the parts of cuDNN");
            for part in PARTS {
                // SAFETY: these are parts of the library that is loaded already, which would load them itself.
                match unsafe { libloading::Library::new(part) } {
                    Ok(loaded) => std::mem::forget(loaded), // lives as long as the process
                    Err(error) => tracing::debug!(part, %error, "a part of cuDNN is not loaded ahead"),
                }
                timeline.part(part);
            }
        };
        let thread = std::thread::Builder::new().name("cudnn".to_owned());
        if let Err(error) = thread.spawn(load) {
            tracing::debug!(%error, "the parts of cuDNN are loaded when they are needed");
        }
    }

    /// The version for display: 9.19.0.
    pub(crate) fn version(&self) -> String {
        version_text(self.version)
    }

    /// Converts a status to a result.
    pub(super) fn check(&self, status: i32, call: &'static str) -> Outcome<()> {
        if status == 0 {
            return Ok(());
        }
        let mut reason = [0u8; REASON_BYTES];
        // SAFETY: it writes at most this many bytes, NUL-terminated.
        unsafe { (self.last_error)(reason.as_mut_ptr().cast(), reason.len()) };
        let ends = reason.iter().position(|byte| *byte == 0).unwrap_or(0);
        Err(Failure {
            call,
            status,
            reason: String::from_utf8_lossy(&reason[..ends]).trim().to_owned(),
        })
    }
}

fn version_text(version: usize) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_as_a_reason() {
        let reason = Library::open("libcudnn-that-nobody-has.so.9").err();
        let reason = reason.expect("no library");
        assert!(
            reason.starts_with("libcudnn-that-nobody-has.so.9 cannot be loaded: "),
            "{reason}"
        );
    }

    #[test]
    fn a_library_without_the_functions_is_reported_as_a_reason() {
        let reason = Library::open("libc.so.6").err().expect("not cuDNN");
        assert!(reason.starts_with("libc.so.6 has no cudnnGetVersion"), "{reason}");
    }

    #[test]
    fn versions_are_formatted_with_dots() {
        assert_eq!(version_text(91301), "9.13.1");
        assert_eq!(version_text(92700), "9.27.0");
    }
}
