//! The thread that owns a card, and its command channel.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Card, CardError, Flow, Link};
use crate::messages::{Command, Event, Ticket};

/// How a card's thread ended.
#[derive(Debug)]
pub enum ThreadEnd {
    /// By [`Command::Shutdown`], or because all senders are gone.
    Shutdown,
    /// The card could not be taken into service.
    NeverReady(CardError),
    /// The card is lost. Its objects were leaked on purpose, since dropping them would touch the card: the process
    /// must end without running destructors.
    Lost(String),
    /// The thread panicked.
    Panicked,
}

/// A card's thread.
#[derive(Debug)]
pub struct CardThread {
    commands: CardCommands,
    thread: JoinHandle<ThreadEnd>,
}

/// The command channel of a card's thread. Clones share it.
#[derive(Clone, Debug)]
pub struct CardCommands {
    sender: Sender<Command>,
    orders: Orders,
}

/// Orders in flight; the flag is true once an order is cancelled. Shared with the card's thread, which cannot
/// receive commands while it runs an order.
#[derive(Clone, Debug, Default)]
struct Orders(Arc<Mutex<BTreeMap<Ticket, bool>>>);

impl Orders {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Ticket, bool>> {
        // The map holds plain values, so it is valid even after a panic with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a thread and creates the card on it: no object of a card crosses threads. `events` is called on that thread
/// and must not block.
///
/// # Errors
/// When the system cannot start a thread.
pub fn spawn(
    card: impl FnOnce() -> Result<Card, CardError> + Send + 'static,
    events: impl Fn(Event) + Send + 'static,
) -> std::io::Result<CardThread> {
    let (sender, receiver) = channel();
    let orders = Orders::default();
    let mut link = ThreadLink {
        events,
        orders: orders.clone(),
    };
    let thread = std::thread::Builder::new()
        .name("card".to_owned())
        .spawn(move || {
            let card = match card() {
                Ok(card) => card,
                Err(error) => return ThreadEnd::NeverReady(error),
            };
            serve(card, &receiver, &mut link)
        })?;
    Ok(CardThread {
        commands: CardCommands { sender, orders },
        thread,
    })
}

impl CardThread {
    /// Sends a command. False if the thread has ended.
    pub fn send(&self, command: Command) -> bool {
        self.commands.send(command)
    }

    /// Another sender to the same thread.
    pub fn commands(&self) -> CardCommands {
        self.commands.clone()
    }

    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end, after [`Command::Shutdown`] or the loss of the card.
    pub fn join(self) -> ThreadEnd {
        drop(self.commands);
        self.thread.join().unwrap_or(ThreadEnd::Panicked)
    }
}

impl CardCommands {
    /// Sends a command. Cancellation takes effect at once, even during an order. False if the thread has ended.
    pub fn send(&self, command: Command) -> bool {
        match command {
            Command::Cancel(ticket) => {
                if let Some(cancelled) = self.orders.lock().get_mut(&ticket) {
                    *cancelled = true;
                }
                return true;
            }
            Command::Run(ref order) => {
                self.orders
                    .lock()
                    .extend(order.tickets().map(|ticket| (ticket, false)));
            }
            Command::Standing(_)
            | Command::Unload { .. }
            | Command::Trim { .. }
            | Command::MakeRoom { .. }
            | Command::Shutdown => {}
        }
        self.sender.send(command).is_ok()
    }
}

fn serve(mut card: Card, commands: &Receiver<Command>, link: &mut dyn Link) -> ThreadEnd {
    card.announce(link);
    loop {
        let flow = match commands.recv_timeout(card.time_until_tick()) {
            Ok(command) => card.handle(command, link),
            Err(RecvTimeoutError::Timeout) => card.tick(link),
            Err(RecvTimeoutError::Disconnected) => Flow::Shutdown,
        };
        match flow {
            Flow::Continue => {}
            Flow::Shutdown => return ThreadEnd::Shutdown,
            Flow::Lost(reason) => {
                std::mem::forget(card);
                return ThreadEnd::Lost(reason);
            }
        }
    }
}

/// Forwards events out of the thread.
struct ThreadLink<F> {
    events: F,
    orders: Orders,
}

impl<F: Fn(Event)> Link for ThreadLink<F> {
    fn emit(&mut self, event: Event) {
        if let Event::Finished { ticket, .. } = &event {
            self.orders.lock().remove(ticket);
        }
        (self.events)(event);
    }

    fn cancelled(&self, ticket: Ticket) -> bool {
        self.orders.lock().get(&ticket).copied().unwrap_or(false)
    }
}
