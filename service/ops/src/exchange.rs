//! Rows that two devices exchange while each computes a part of one stage.

use std::cell::Cell;

use candle_core::{Device, Result, Tensor};

mod host;

/// Sends the other device's process some bytes, and waits for those that it sends.
pub type Meet<'a, E> = dyn FnMut(&[u8]) -> std::result::Result<Vec<u8>, E> + 'a;

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
    /// The exchange of this device with another, of up to `bytes` bytes at a time.
    ///
    /// # Errors
    /// Errors of `meet` and of the device: cards that do not reach each other's memory among them.
    pub fn open<E: From<candle_core::Error>>(
        device: &Device,
        bytes: u64,
        meet: &mut Meet<'_, E>,
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

    /// Closes the other device's memory, and waits until the other one has closed this device's: what is free on either is then free
    /// when the exchange is dropped. `meet` is that of [`Exchange::open`]. One that is broken off is dropped without it.
    ///
    /// # Errors
    /// Errors of `meet` and of the device.
    pub fn close<E: From<candle_core::Error>>(&self, meet: &mut Meet<'_, E>) -> std::result::Result<(), E> {
        match &self.end {
            End::Host(_) => {}
            #[cfg(feature = "cuda")]
            End::Card(end) => end.close_other()?,
        }
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
    fn a_swap_with_a_device_that_has_ended_is_an_error() {
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
    fn a_wait_for_cancelled_work_is_an_error() {
        let [first, _] = with_both(|_, exchange| exchange.wait_for_work(&|| true));
        assert!(first.is_err());
    }

    /// Exchanges between two processes, each with a card: the second card of the machine, or both the first one.
    #[cfg(feature = "cuda")]
    mod on_cards {
        use std::io::{BufRead, BufReader, Write};
        use std::process::{Command, Stdio};
        use std::time::Instant;

        use super::*;
        use crate::testing::test_device;

        /// Bytes before each offer in the output of a process, in which there is more.
        const OFFER: &str = "offer ";
        const ROWS: usize = 300;
        const TURNS: usize = 6;

        fn hex(bytes: &[u8]) -> String {
            bytes.iter().map(|byte| format!("{byte:02x}")).collect()
        }

        fn of_hex(line: &str) -> Option<Vec<u8>> {
            let digits = line.trim().split_once(OFFER)?.1;
            let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
            (0..digits.len()).step_by(2).map(byte).collect()
        }

        /// Sends an offer in a line, and reads the other's.
        fn meet(to: &mut impl Write, from: &mut impl BufRead, offer: &[u8]) -> Result<Vec<u8>> {
            writeln!(to, "\n{OFFER}{}", hex(offer))?;
            to.flush()?;
            let mut line = String::new();
            while from.read_line(&mut line)? > 0 {
                if let Some(offer) = of_hex(&line) {
                    return Ok(offer);
                }
                line.clear();
            }
            candle_core::bail!("the other process has ended")
        }

        /// What a process sends in a turn, and what it expects: numbers that tell process, turn and row.
        fn rows_of(part: usize, turn: usize, rows: usize) -> Result<Tensor> {
            let first = (part * 1000 + turn * 10) as f32;
            let columns = Tensor::arange(0.0, 96.0_f32, &Device::Cpu)?.broadcast_as((1, rows, 96))?;
            let at = Tensor::arange(0, rows as u32, &Device::Cpu)?.to_dtype(DType::F32)?;
            let all = columns.broadcast_add(&at.reshape((1, rows, 1))?)?;
            (all + f64::from(first))?.to_dtype(DType::BF16)
        }

        /// Exchanges some turns of rows in the middle columns of wider rows, and checks what has arrived.
        fn exchange_turns(part: usize, exchange: &Exchange, device: &Device) -> Result<()> {
            // One row more on one side.
            let (own, others) = (ROWS + part, ROWS + 1 - part);
            let all = Tensor::zeros((1, own + others, 128), DType::BF16, device)?;
            let middle = |first: usize, rows: usize| all.narrow(1, first, rows)?.narrow(2, 16, 96);
            for turn in 0..TURNS {
                crate::copy_rows(&rows_of(part, turn, own)?.to_device(device)?, &middle(0, own)?)?;
                exchange.swap(&middle(0, own)?, &middle(own, others)?)?;
                if turn % 2 == 0 {
                    exchange.wait_for_work(&|| false)?;
                }
                let found = middle(own, others)?
                    .to_device(&Device::Cpu)?
                    .to_dtype(DType::F32)?;
                let expected = rows_of(1 - part, turn, others)?.to_dtype(DType::F32)?;
                let differs = found
                    .ne(&expected)?
                    .to_dtype(DType::F32)?
                    .sum_all()?
                    .to_scalar::<f32>()?;
                if differs > 0.0 {
                    candle_core::bail!("{differs} numbers of turn {turn} are others");
                }
            }
            Ok(())
        }

        fn exchange_much(exchange: &Exchange, device: &Device) -> Result<f64> {
            let rows = Tensor::zeros((1, 8192, 6144), DType::BF16, device)?;
            let (own, theirs) = (rows.narrow(1, 0, 4096)?, rows.narrow(1, 4096, 4096)?);
            exchange.swap(&own, &theirs)?;
            exchange.wait_for_work(&|| false)?;
            let began = Instant::now();
            for _ in 0..20 {
                exchange.swap(&own, &theirs)?;
            }
            exchange.wait_for_work(&|| false)?;
            Ok(20.0 * (own.elem_count() * 2) as f64 / began.elapsed().as_secs_f64() / 1e9)
        }

        const BYTES: u64 = 64 << 20;

        #[test]
        #[allow(clippy::print_stdout)] // The speed is for readers of the output.
        fn two_processes_exchange_rows_and_each_ends_alone() -> Result<()> {
            if test_device().is_cpu() {
                return Ok(());
            }
            let other = [
                "exchange::tests::on_cards::other_process",
                "--exact",
                "--ignored",
                "--nocapture",
            ];
            let mut child = Command::new(std::env::current_exe()?)
                .args(other)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let (Some(mut to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
                candle_core::bail!("no pipes");
            };
            let mut from = BufReader::new(from);
            let device = test_device();
            let mut meet = |offer: &[u8]| meet(&mut to, &mut from, offer);
            let exchange = Exchange::open(device, BYTES, &mut meet)?;
            exchange_turns(0, &exchange, device)?;
            println!("{:.0} GB/s each way", exchange_much(&exchange, device)?);
            exchange.close(&mut meet)?;
            drop(exchange);
            // The second exchange is left by the other process without a word.
            let exchange = Exchange::open(device, BYTES, &mut meet)?;
            child.wait()?;
            let rows = Tensor::zeros((2, 4, 96), DType::BF16, device)?;
            exchange.swap(&rows.narrow(0, 0, 1)?, &rows.narrow(0, 1, 1)?)?;
            let began = Instant::now();
            let ended = exchange.wait_for_work(&|| began.elapsed().as_millis() > 200);
            assert!(ended.is_err(), "it waits for nobody");
            drop(exchange);
            let sum = (Tensor::ones(8, DType::F32, device)? * 2.0)?
                .sum_all()?
                .to_scalar::<f32>()?;
            assert_eq!(sum, 16.0, "the card computes on");
            Ok(())
        }

        #[test]
        #[ignore = "the other process of a test"]
        #[allow(clippy::print_stdout)] // It is how the processes meet.
        fn other_process() -> Result<()> {
            let device = match Device::new_cuda_with_stream(1) {
                Ok(second) => second,
                Err(_) => Device::new_cuda_with_stream(0)?,
            };
            let (mut to, mut from) = (std::io::stdout(), std::io::stdin().lock());
            let mut meet = |offer: &[u8]| meet(&mut to, &mut from, offer);
            let exchange = Exchange::open(&device, BYTES, &mut meet)?;
            exchange_turns(1, &exchange, &device)?;
            exchange_much(&exchange, &device)?;
            exchange.close(&mut meet)?;
            drop(exchange);
            Exchange::open(&device, BYTES, &mut meet).map(drop)
        }
    }
}
