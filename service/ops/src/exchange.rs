//! Rows that two devices exchange while each computes a part of one stage.

use std::cell::Cell;

use candle_core::{Device, Result, Tensor};

mod host;

/// An exchange of rows between two devices, each with a process of its own: whatever one sends, the other receives, and the other way
/// round. Exchanges follow each other in the same order on both. On a card they are enqueued, and nothing waits for them but the card.
#[derive(Debug)]
pub struct Exchange {
    end: End,
    /// The most that is exchanged at a time.
    bytes: u64,
    /// How many exchanges were begun.
    count: Cell<u32>,
}

#[derive(Debug)]
enum End {
    /// In this process: for tests.
    Host(host::HostEnd),
    #[cfg(feature = "cuda")]
    Card(Box<crate::cuda::CardEnd>),
}

/// Last words of an exchange.
const DONE: &[u8] = b"done";

impl Exchange {
    /// The exchange of this device with another, of up to `bytes` bytes at a time. `meet` sends the other device's process some bytes,
    /// and waits for those that it sends.
    ///
    /// # Errors
    /// Errors of `meet` and of the device: cards that do not reach each other's memory among them.
    pub fn open<E: From<candle_core::Error>>(
        device: &Device,
        bytes: u64,
        meet: &mut dyn FnMut(&[u8]) -> std::result::Result<Vec<u8>, E>,
    ) -> std::result::Result<Exchange, E> {
        let end = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let (own, offer) = crate::cuda::OwnEnd::new(device, bytes)?;
                End::Card(Box::new(own.with(&meet(&offer)?)?))
            }
            _ => {
                let (own, offer) = host::OwnEnd::new();
                End::Host(own.with(&meet(&offer)?)?)
            }
        };
        Ok(Exchange {
            end,
            bytes,
            count: Cell::new(0),
        })
    }

    /// Bytes of a device's memory for an exchange of up to `bytes` bytes at a time.
    pub fn allocated(bytes: u64) -> u64 {
        #[cfg(feature = "cuda")]
        return crate::cuda::exchange_allocated(bytes);
        #[cfg(not(feature = "cuda"))]
        return 2 * bytes;
    }

    /// Sends rows to the other device, and receives what it sends. `own` and `theirs` are `[.., d]` of one dtype, and may be strided
    /// views; both devices agree on the counts of rows.
    ///
    /// # Errors
    /// When they exceed the bytes of the exchange; when the other device has ended; errors of the device.
    pub fn swap(&self, own: &Tensor, theirs: &Tensor) -> Result<()> {
        if own.dtype() != theirs.dtype() {
            candle_core::bail!("{:?} exchanged for {:?}", own.dtype(), theirs.dtype());
        }
        for rows in [own, theirs] {
            let found = (rows.elem_count() * rows.dtype().size_in_bytes()) as u64;
            if found > self.bytes {
                candle_core::bail!("{found} bytes exchanged, with space for {}", self.bytes);
            }
        }
        let number = self.count.get().wrapping_add(1);
        self.count.set(number);
        match &self.end {
            End::Host(end) => end.swap(own, theirs),
            #[cfg(feature = "cuda")]
            End::Card(end) => end.swap(number, own, theirs),
        }
    }

    /// Waits until the device has done all work, which may wait for the other device, unless `is_over`: then it waits no more.
    ///
    /// # Errors
    /// When it is over; errors of the device.
    pub fn wait_for_work(&self, is_over: &dyn Fn() -> bool) -> Result<()> {
        match &self.end {
            End::Host(_) if is_over() => candle_core::bail!("the exchange with the other device was ended"),
            End::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            End::Card(end) => end.wait_for_work(is_over),
        }
    }

    /// Waits until the other device needs nothing of this end any more. An exchange that was not broken off is dropped after it. `meet`
    /// is that of [`Exchange::open`].
    ///
    /// # Errors
    /// Errors of `meet`.
    pub fn close<E: From<candle_core::Error>>(
        &self,
        meet: &mut dyn FnMut(&[u8]) -> std::result::Result<Vec<u8>, E>,
    ) -> std::result::Result<(), E> {
        meet(DONE).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use candle_core::DType;

    use super::*;

    /// Runs both ends of an exchange on the CPU, each on a thread of its own.
    fn with_both<T: Send>(work: impl Fn(usize, Exchange) -> Result<T> + Sync) -> [Result<T>; 2] {
        let (to_second, from_first) = mpsc::channel::<Vec<u8>>();
        let (to_first, from_second) = mpsc::channel::<Vec<u8>>();
        let run = |part: usize, to: mpsc::Sender<Vec<u8>>, from: mpsc::Receiver<Vec<u8>>| {
            let mut meet = |offer: &[u8]| -> Result<Vec<u8>> {
                to.send(offer.to_vec()).map_err(candle_core::Error::wrap)?;
                from.recv().map_err(candle_core::Error::wrap)
            };
            work(part, Exchange::open(&Device::Cpu, 1 << 10, &mut meet)?)
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| run(1, to_first, from_first));
            let first = run(0, to_second, from_second);
            [
                first,
                second
                    .join()
                    .unwrap_or_else(|_| candle_core::bail!("it panicked")),
            ]
        })
    }

    #[test]
    fn each_receives_what_the_other_sends_in_order() -> Result<()> {
        let exchanged = with_both(|part, exchange| {
            let all = Tensor::zeros((1, 5, 6), DType::F32, &Device::Cpu)?.copy()?;
            let mut received = Vec::new();
            for turn in 0..4 {
                // Two rows from the first, one from the second, of the middle columns of wider rows.
                let (rows, others) = ([2, 1][part], [1, 2][part]);
                let filled = Tensor::full((10 * part + turn) as f32, (1, rows, 4), &Device::Cpu)?;
                let own = all.narrow(1, 0, rows)?.narrow(2, 1, 4)?;
                crate::copy_rows(&filled, &own)?;
                let theirs = all.narrow(1, rows, others)?.narrow(2, 1, 4)?;
                exchange.swap(&own, &theirs)?;
                received.push(theirs.flatten_all()?.to_vec1::<f32>()?);
            }
            Ok(received)
        });
        let [first, second] = exchanged;
        assert_eq!(first?[3], [13.0; 4]);
        assert_eq!(
            second?,
            (0..4).map(|turn| vec![turn as f32; 8]).collect::<Vec<_>>()
        );
        Ok(())
    }

    #[test]
    fn an_end_that_is_gone_is_an_error() {
        let [_, second] = with_both(|part, exchange| {
            let rows = Tensor::zeros((1, 2, 4), DType::F32, &Device::Cpu)?.copy()?;
            match part {
                0 => Ok(()), // ends, and sends nothing
                _ => exchange.swap(&rows, &rows.copy()?),
            }
        });
        assert!(second.is_err());
    }

    #[test]
    fn what_is_over_is_not_waited_for() {
        let [first, _] = with_both(|_, exchange| exchange.wait_for_work(&|| true));
        assert!(first.is_err());
    }
}
