//! Work that is given to a card once, and run many times.

use std::fmt;

use candle_core::{Device, Result};

use crate::libraries::{AttentionPaths, count_attention_paths};

/// Work that was recorded. It keeps the tensors that it uses.
pub struct RecordedWork {
    #[cfg(feature = "cuda")]
    graph: crate::cuda::Graph,
    /// The attentions in it.
    attentions: AttentionPaths,
}

impl fmt::Debug for RecordedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedWork").finish_non_exhaustive()
    }
}

/// Records the work that `queue` gives a device by operations of this crate. None of it runs until [`RecordedWork::run`], which takes a
/// fraction of the host's time for the launches: a pass of many small operations is bound by that.
///
/// The same work was run before, so that what is made at a first use is there: plans, the choice of algorithms, workspaces.
///
/// `None` where it cannot be recorded; the caller queues it then: on the CPU; where `queue` fails; where an operation
/// allocates memory, copies from host memory, or waits for the device.
pub fn record<E: fmt::Display>(
    device: &Device,
    queue: impl FnOnce() -> std::result::Result<(), E>,
) -> Option<RecordedWork> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(card) = device {
        let before = AttentionPaths::now();
        let mut queued = Ok(());
        let graph = crate::cuda::Graph::of(card, || queued = queue());
        let attentions = AttentionPaths::now().less(before);
        if let Err(error) = queued {
            tracing::debug!(%error, "work fails while it is recorded");
            return None;
        }
        return match graph {
            Ok(graph) => Some(RecordedWork {
                graph: graph?,
                attentions,
            }),
            Err(error) => {
                tracing::debug!(%error, "recorded work cannot be made ready");
                None
            }
        };
    }
    let _ = (device, queue);
    None
}

impl RecordedWork {
    /// Enqueues the work on its device.
    ///
    /// # Errors
    /// When the memory of a tensor that it uses has been taken away; errors of the device.
    pub fn run(&self) -> Result<()> {
        count_attention_paths(self.attentions);
        #[cfg(feature = "cuda")]
        return self.graph.run();
        #[cfg(not(feature = "cuda"))]
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Tensor};

    use super::*;
    use crate::testing::{here, random, test_device};
    use crate::{Epilogue, LinearLayer, Scratch, add_residual, blank, copy_rows, linear_into};

    /// Two layers and a sum, in buffers.
    struct Work {
        x: Tensor,
        weight: gpu::Weight,
        between: Tensor,
        out: Tensor,
        scratch: Scratch,
    }

    impl Work {
        fn new() -> Result<Work> {
            let buffer = || Tensor::zeros((5, 64), DType::F32, test_device());
            Ok(Work {
                x: buffer()?,
                weight: gpu::Weight::Full(here(&random(&[64, 64], 1)?)),
                between: buffer()?,
                out: buffer()?,
                scratch: Scratch::new(0, test_device())?,
            })
        }

        fn queue(&self) -> Result<()> {
            let layer = LinearLayer::new(&self.weight, None);
            linear_into(&self.x, &layer, Epilogue::None, &self.between, &self.scratch)?;
            linear_into(
                &self.between,
                &layer,
                Epilogue::GeluTanh,
                &self.out,
                &self.scratch,
            )?;
            add_residual(&self.out, &self.x, None)
        }

        /// The bits of the result for other inputs, by `run`.
        fn result(&self, seed: u64, run: impl FnOnce() -> Result<()>) -> Result<Vec<u32>> {
            copy_rows(&here(&random(&[5, 64], seed)?), &self.x)?;
            run()?;
            let numbers = self.out.flatten_all()?.to_vec1::<f32>()?;
            Ok(numbers.into_iter().map(f32::to_bits).collect())
        }
    }

    #[test]
    fn recorded_work_gives_the_bits_of_the_same_work_for_other_inputs() -> Result<()> {
        let work = Work::new()?;
        let wanted = [2, 3].map(|seed| work.result(seed, || work.queue()));
        let Some(recorded) = record(test_device(), || work.queue()) else {
            assert!(test_device().is_cpu(), "a card records work");
            return Ok(());
        };
        for (seed, wanted) in [2, 3].into_iter().zip(wanted) {
            assert_eq!(work.result(seed, || recorded.run())?, wanted?);
        }
        // It keeps what it uses.
        let (x, out) = (work.x.clone(), work.out.clone());
        let wanted = work.result(4, || work.queue())?;
        drop(work);
        let _others = [(); 9].map(|()| Tensor::ones((64, 64), DType::F32, test_device()));
        copy_rows(&here(&random(&[5, 64], 4)?), &x)?;
        recorded.run()?;
        let bits = out.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits);
        assert_eq!(bits.collect::<Vec<_>>(), wanted);
        Ok(())
    }

    #[test]
    fn work_that_allocates_copies_or_waits_is_not_recorded_and_runs_as_before() -> Result<()> {
        let work = Work::new()?;
        let wanted = work.result(2, || work.queue())?;
        let on_host = random(&[5, 64], 5)?;
        let allocates = || blank(&[4], DType::F32, test_device()).map(drop);
        let copies = || here(&on_host).to_dtype(DType::F32).map(drop);
        let waits = || work.out.flatten_all()?.to_vec1::<f32>().map(drop);
        let fails = || candle_core::bail!("it fails");
        let kinds: [&dyn Fn() -> Result<()>; 4] = [&allocates, &copies, &waits, &fails];
        for (number, kind) in kinds.into_iter().enumerate() {
            let both = || work.queue().and_then(|()| kind());
            assert!(record(test_device(), both).is_none(), "{number}");
            assert_eq!(work.result(2, || work.queue())?, wanted, "after {number}");
        }
        let panics = || -> Result<()> { panic!("in the midst of it") };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            record(test_device(), panics);
        }));
        assert_eq!(panicked.is_err(), test_device().is_cuda());
        assert_eq!(work.result(2, || work.queue())?, wanted);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn recorded_work_is_refused_when_the_memory_of_a_tensor_is_gone() -> Result<()> {
        use candle_core::backend::BackendStorage as _;

        /// Puts other memory in the place of a tensor's.
        struct Replace;

        impl candle_core::InplaceOp1 for Replace {
            fn name(&self) -> &'static str {
                "replace"
            }

            fn cpu_fwd(&self, _: &mut candle_core::CpuStorage, _: &candle_core::Layout) -> Result<()> {
                Ok(())
            }

            fn cuda_fwd(
                &self,
                storage: &mut candle_core::CudaStorage,
                layout: &candle_core::Layout,
            ) -> Result<()> {
                *storage = storage.try_clone(layout)?;
                Ok(())
            }
        }

        let work = Work::new()?;
        work.result(2, || work.queue())?;
        let Some(recorded) = record(test_device(), || work.queue()) else {
            return Ok(());
        };
        recorded.run()?;
        work.between.inplace_op1(&Replace)?;
        let refused = recorded.run().expect_err("the memory is gone").to_string();
        assert!(refused.contains("[5, 64]"), "{refused}");
        Ok(())
    }
}
