//! [`crate::Exchange`] between two cards: each writes its rows into memory of the other, and numbers beside them tell what has arrived
//! and what has been taken.

use std::cell::RefCell;
use std::time::Duration;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{Device, Result, Tensor};
use cudarc::driver::{CudaEvent, DeviceRepr, DriverError};
use gpu::{OpenedMemory, SHARED_HANDLE_BYTES, SharedMemory, SharedNumber};

use super::Card;
use super::elementwise::{copy_rows_from, copy_rows_to};

/// Places for rows in each memory, which are used in turn: a card may be one exchange ahead of the other.
const PLACES: u32 = 2;

/// Bytes before the places: the number of exchanges that have arrived, and, on a line of its own, of those that were taken.
const NUMBERS: u64 = 256;
const TAKEN: u64 = 128;

/// The longest that a card waits for the other: far more than any step between two exchanges. Cards that die are noticed earlier, by
/// those who started them.
const MOST: Duration = Duration::from_secs(120);

/// How often a host that waits for its card looks whether it has to stop.
const LOOK: Duration = Duration::from_micros(100);

/// What `stop` says.
const GO_ON: u32 = 0;
const STOPPED: u32 = 1;
const TOO_LONG: u32 = 2;

/// Mirrors the struct in `exchange.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExchangeArguments {
    number: u64,
    stop: u64,
    most_nanoseconds: u64,
    value: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for ExchangeArguments {}

/// This card's memory of an exchange, which the other card is to open.
#[derive(Debug)]
pub(crate) struct OwnEnd {
    device: Device,
    own: SharedMemory,
    /// Bytes of a place.
    place: u64,
}

/// One card of an exchange.
#[derive(Debug)]
pub(crate) struct CardEnd {
    device: Device,
    // In the order in which they are freed: the other card's memory before that which it writes to.
    other: RefCell<Option<OpenedMemory>>,
    own: SharedMemory,
    place: u64,
    stop: SharedNumber,
    done: CudaEvent,
}

/// Bytes of a card's memory for an exchange of up to `bytes` bytes at a time.
pub(crate) fn allocated(bytes: u64) -> u64 {
    SharedMemory::allocated(memory_of(bytes))
}

/// The driver does not let the cards exchange.
fn unreachable(error: DriverError) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "the cards do not reach each other's memory ({error}): use one card"
    ))
}

fn memory_of(bytes: u64) -> u64 {
    NUMBERS + u64::from(PLACES) * place_of(bytes)
}

fn place_of(bytes: u64) -> u64 {
    bytes.next_multiple_of(NUMBERS)
}

impl OwnEnd {
    /// Memory for up to `bytes` bytes at a time, and the bytes by which the other card opens it.
    pub(crate) fn new(device: &Device, bytes: u64) -> Result<(OwnEnd, [u8; SHARED_HANDLE_BYTES])> {
        let stream = device.as_cuda_device()?.cuda_stream();
        let own = SharedMemory::new(&stream, memory_of(bytes)).w()?;
        let handle = own.handle().map_err(unreachable)?;
        let end = OwnEnd {
            device: device.clone(),
            own,
            place: place_of(bytes),
        };
        Ok((end, handle))
    }

    /// The exchange with the card that has sent this.
    pub(crate) fn with(self, handle: &[u8]) -> Result<CardEnd> {
        let handle = <[u8; SHARED_HANDLE_BYTES]>::try_from(handle).map_err(candle_core::Error::wrap)?;
        let stream = self.device.as_cuda_device()?.cuda_stream();
        Ok(CardEnd {
            other: RefCell::new(Some(OpenedMemory::open(&stream, handle).map_err(unreachable)?)),
            own: self.own,
            place: self.place,
            stop: SharedNumber::new(stream.context()).w()?,
            done: stream.context().new_event(None).w()?,
            device: self.device,
        })
    }
}

impl CardEnd {
    /// Exchange `number`, from 1, of rows for which a place has space.
    pub(crate) fn swap(&self, number: u32, own: &Tensor, theirs: &Tensor) -> Result<()> {
        let Some(other) = self.other.borrow().as_ref().map(OpenedMemory::address) else {
            candle_core::bail!("the exchange with the other card has ended");
        };
        let at = NUMBERS + u64::from(number % PLACES) * self.place;
        // The place that it writes to was last used so many exchanges ago.
        self.wait(self.own.address() + TAKEN, number.saturating_sub(PLACES))?;
        // SAFETY: the place is that long, and the other card has taken what was there.
        unsafe { copy_rows_to(own, other + at)? };
        self.signal(other, number)?;
        self.wait(self.own.address(), number)?;
        // SAFETY: the place is that long.
        unsafe { copy_rows_from(self.own.address() + at, theirs)? };
        self.signal(other + TAKEN, number)
    }

    /// Closes the other card's memory, after the work that uses it.
    pub(crate) fn close_other(&self) -> Result<()> {
        self.device.as_cuda_device()?.cuda_stream().synchronize().w()?;
        self.other.replace(None);
        Ok(())
    }

    /// Has the card write a number once it has done all work before.
    fn signal(&self, number: u64, value: u32) -> Result<()> {
        self.launch("exchange_signal", number, value)
    }

    /// Has the card wait until a number is at least this.
    fn wait(&self, number: u64, value: u32) -> Result<()> {
        self.launch("exchange_wait", number, value)
    }

    fn launch(&self, kernel: &str, number: u64, value: u32) -> Result<()> {
        let device = self.device.as_cuda_device()?;
        let arguments = ExchangeArguments {
            number,
            stop: self.stop.address(),
            most_nanoseconds: u64::try_from(MOST.as_nanos()).unwrap_or(u64::MAX),
            value,
            unused: 0,
        };
        let (card, stream) = (Card::of(device)?, device.cuda_stream());
        // SAFETY: the structure mirrors `exchange.cuh`; the number is in memory that is shared with the other card, and `stop` in
        // the machine's, and both live as long as this.
        unsafe { card.launch(&stream, kernel.to_owned(), (1, 1, 1), 1, &arguments) }
    }

    /// Waits until the card has done its work, or `is_over` says that it is for nothing: then the card waits no more.
    pub(crate) fn wait_for_work(&self, is_over: &dyn Fn() -> bool) -> Result<()> {
        let stream = self.device.as_cuda_device()?.cuda_stream();
        self.done.record(&stream).w()?;
        while !self.done.is_complete() {
            if is_over() {
                self.stop();
                break;
            }
            std::thread::sleep(LOOK);
        }
        stream.synchronize().w()?;
        match self.stop.get() {
            GO_ON => Ok(()),
            TOO_LONG => candle_core::bail!(
                "the other card has not answered for {} s: use one card",
                MOST.as_secs()
            ),
            _ => candle_core::bail!("the exchange with the other card was ended"),
        }
    }

    fn stop(&self) {
        self.stop.set(STOPPED);
    }
}

impl Drop for CardEnd {
    fn drop(&mut self) {
        // Work that still waits for the other card ends, and all of it before the memory that it writes to is closed.
        self.stop();
        let stream = self.device.as_cuda_device().map(|device| device.cuda_stream());
        if let Err(error) = stream.and_then(|stream| stream.synchronize().w()) {
            tracing::warn!(%error, "the work of an exchange cannot be waited for");
        }
    }
}
