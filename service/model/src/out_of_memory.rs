//! Detection of out-of-memory errors of a card.

use candle_core::Error;

/// Whether the error is a lack of card memory: the driver's, or of cuBLAS, cuDNN or cuRAND.
///
/// candle boxes the libraries' errors and keeps only their text, so the text is examined; and only that of the
/// innermost error, since a backtrace around it may contain anything.
pub fn is_out_of_memory(error: &Error) -> bool {
    match error {
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } | Error::WithPath { inner, .. } => {
            is_out_of_memory(inner)
        }
        Error::WrappedContext { wrapped, .. } => match wrapped.downcast_ref::<Error>() {
            Some(inner) => is_out_of_memory(inner),
            None => says_out_of_memory(&wrapped.to_string()),
        },
        Error::Cuda(cause) => says_out_of_memory(&cause.to_string()),
        Error::Wrapped(cause) => says_out_of_memory(&cause.to_string()),
        Error::Msg(words) => says_out_of_memory(words),
        _ => false,
    }
}

/// The libraries' messages, as cudarc prints their codes. cuDNN also reports a failed host allocation, which freeing
/// card memory does not help.
fn says_out_of_memory(words: &str) -> bool {
    const CODES: [&str; 6] = [
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CURAND_STATUS_ALLOCATION_FAILED",
        "out of memory",
    ];
    CODES.iter().any(|code| words.contains(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library's error, of which candle keeps only the text.
    #[derive(Debug)]
    struct Library(&'static str);

    impl std::fmt::Display for Library {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl std::error::Error for Library {}

    #[test]
    fn out_of_memory_is_distinguished_from_other_library_errors() {
        for (words, expected) in [
            ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", true),
            (
                "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"\") when loading reduce",
                true,
            ),
            ("CublasError(CUBLAS_STATUS_ALLOC_FAILED)", true),
            ("CudnnError(CUDNN_STATUS_ALLOC_FAILED)", true),
            (
                "CudnnError(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)",
                true,
            ),
            ("CurandError(CURAND_STATUS_ALLOCATION_FAILED)", true),
            (
                "CudnnError(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED)",
                false,
            ),
            (
                "DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access\")",
                false,
            ),
            ("CublasError(CUBLAS_STATUS_EXECUTION_FAILED)", false),
            ("no kernel image is available", false),
        ] {
            assert_eq!(
                is_out_of_memory(&Error::Cuda(Box::new(Library(words)))),
                expected,
                "{words}"
            );
            assert_eq!(
                is_out_of_memory(&Error::wrap(Library(words))),
                expected,
                "{words}"
            );
            assert_eq!(
                is_out_of_memory(&Error::Msg(words.to_owned())),
                expected,
                "{words}"
            );
        }
    }

    #[test]
    fn only_the_innermost_error_counts() {
        let memory = || Error::Cuda(Box::new(Library("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"\")")));
        assert!(is_out_of_memory(
            &memory().context("in a block").with_path("a file")
        ));
        let traced = |inner: Error| Error::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        assert!(is_out_of_memory(&traced(memory())));
        // The context around the error is ignored.
        let other = || Error::Msg("a shape does not fit".to_owned());
        assert!(!is_out_of_memory(&traced(
            other().context("CUDA_ERROR_OUT_OF_MEMORY")
        )));
        assert!(!is_out_of_memory(&other()));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn the_libraries_out_of_memory_errors_are_recognized() {
        use candle_core::cuda_backend::{CudaError, cudarc};
        let of = |error: CudaError| is_out_of_memory(&Error::from(error));
        let driver = |code| CudaError::Cuda(cudarc::driver::DriverError(code));
        assert!(of(driver(
            cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
        )));
        assert!(!of(driver(
            cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        )));
        let cublas = |code| CudaError::Cublas(cudarc::cublas::result::CublasError(code));
        assert!(of(cublas(
            cudarc::cublas::sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED
        )));
    }
}
