//! The thread that owns a card, and the way to it.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Card, CardError, Flow, Link};
use crate::messages::{Command, Event, Ticket};

/// How a card's thread ended.
#[derive(Debug)]
pub enum End {
    /// It was told to, or nobody can tell it anything any more.
    Shutdown,
    /// The card could not be taken into service.
    NeverReady(CardError),
    /// The card is lost. What lived on it was leaked on purpose, since dropping it would touch the card: the process
    /// is to end without running destructors.
    Lost(String),
    /// A fault of ours.
    Panicked,
}

/// A card on a thread of its own.
#[derive(Debug)]
pub struct CardThread {
    commands: CardCommands,
    thread: JoinHandle<End>,
}

/// The way to a card's thread. Clones lead to the same one.
#[derive(Clone, Debug)]
pub struct CardCommands {
    sender: Sender<Command>,
    orders: Orders,
}

/// Orders that have been sent and not answered, and whether anybody still wants them. Shared with the card's thread,
/// which cannot hear a command while it runs an order.
#[derive(Clone, Debug, Default)]
struct Orders(Arc<Mutex<BTreeMap<Ticket, bool>>>);

impl Orders {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Ticket, bool>> {
        // Whoever panicked with it left a map of plain values.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a thread, makes the card on it, and keeps it there: nothing of a card ever crosses a thread. `events` is
/// called on that thread and must not block.
///
/// # Errors
/// When the system starts no thread.
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
                Err(error) => return End::NeverReady(error),
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

    /// Another way to the same thread.
    pub fn commands(&self) -> CardCommands {
        self.commands.clone()
    }

    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end, which [`Command::Shutdown`] brings about, and so does the loss of the card.
    pub fn join(self) -> End {
        drop(self.commands);
        self.thread.join().unwrap_or(End::Panicked)
    }
}

impl CardCommands {
    /// Sends a command. Cancelling takes effect at once, whatever the thread is doing. False if the thread has ended.
    pub fn send(&self, command: Command) -> bool {
        match command {
            Command::Cancel(ticket) => {
                if let Some(cancelled) = self.orders.lock().get_mut(&ticket) {
                    *cancelled = true;
                }
                return true;
            }
            Command::Run(ref order) => {
                self.orders.lock().insert(order.ticket, false);
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

fn serve(mut card: Card, commands: &Receiver<Command>, link: &mut dyn Link) -> End {
    card.announce(link);
    loop {
        let flow = match commands.recv_timeout(card.rest()) {
            Ok(command) => card.handle(command, link),
            Err(RecvTimeoutError::Timeout) => card.tick(link),
            Err(RecvTimeoutError::Disconnected) => Flow::Shutdown,
        };
        match flow {
            Flow::Continue => {}
            Flow::Shutdown => return End::Shutdown,
            Flow::Lost(reason) => {
                std::mem::forget(card);
                return End::Lost(reason);
            }
        }
    }
}

/// Carries events out of the thread.
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
