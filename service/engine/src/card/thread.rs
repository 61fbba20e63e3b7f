//! The thread that owns a card, and its command channel.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use residency::Bytes;

use super::{Card, CardError, Flow, Link};
use crate::messages::{Command, Event, Ticket, must_wait};

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

/// Orders in flight. Shared with the card's thread, which cannot receive commands while it runs an order.
#[derive(Clone, Debug, Default)]
struct Orders(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    orders: Mutex<BTreeMap<Ticket, Known>>,
    changed: Condvar,
}

/// What was received about an order since it was sent.
#[derive(Debug, Default)]
struct Known {
    cancelled: bool,
    /// Bytes of its pieces that the supervisor has taken.
    taken: Bytes,
    /// What the other card that runs its stage has offered, and the stage has not taken yet.
    offers: VecDeque<bytes::Bytes>,
}

impl Orders {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Ticket, Known>> {
        // The map holds plain values, so it is valid even after a panic with the lock held.
        self.0.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is known of an order, if it is in flight.
    fn change(&self, ticket: Ticket, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.lock().get_mut(&ticket) {
            change(known);
        }
        self.0.changed.notify_all();
    }
}

/// Where the events of a card's thread go.
pub trait Events: Send + 'static {
    /// Sends an event. Must not block.
    fn send(&self, event: Event);
    /// Waits until what was sent is on its way, whatever happens to this process.
    fn flush(&self) {}
}

impl<F: Fn(Event) + Send + 'static> Events for F {
    fn send(&self, event: Event) {
        self(event);
    }
}

/// Starts a thread and creates the card on it: no object of a card crosses threads. `events` is used on that thread.
///
/// # Errors
/// When the system cannot start a thread.
pub fn spawn(
    card: impl FnOnce() -> Result<Card, CardError> + Send + 'static,
    events: impl Events,
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
    /// Sends a command. What concerns the order that runs takes effect at once: its cancellation, how much of its result is taken, and
    /// the offers of the other card. False if the thread has ended.
    pub fn send(&self, command: Command) -> bool {
        match command {
            Command::Cancel(ticket) => {
                self.orders.change(ticket, |known| known.cancelled = true);
                return true;
            }
            Command::Taken { ticket, bytes } => {
                self.orders.change(ticket, |known| known.taken = bytes);
                return true;
            }
            Command::Offer { ticket, offer } => {
                self.orders.change(ticket, |known| known.offers.push_back(offer));
                return true;
            }
            Command::Run(ref order) => {
                self.orders
                    .lock()
                    .extend(order.tickets().map(|ticket| (ticket, Known::default())));
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
struct ThreadLink<E> {
    events: E,
    orders: Orders,
}

impl<E: Events> Link for ThreadLink<E> {
    fn emit(&mut self, event: Event) {
        if let Event::Finished { ticket, .. } = &event {
            self.orders.lock().remove(ticket);
        }
        self.events.send(event);
    }

    fn flush(&mut self) {
        self.events.flush();
    }

    fn cancelled(&self, ticket: Ticket) -> bool {
        self.orders
            .lock()
            .get(&ticket)
            .is_some_and(|known| known.cancelled)
    }

    fn wait_until_taken(&mut self, ticket: Ticket, delivered: Bytes) {
        let waits = |orders: &mut BTreeMap<Ticket, Known>| {
            let known = orders.get(&ticket);
            known.is_some_and(|known| !known.cancelled && must_wait(delivered, known.taken))
        };
        drop(self.orders.0.changed.wait_while(self.orders.lock(), waits));
    }

    fn next_offer(&mut self, ticket: Ticket) -> Option<bytes::Bytes> {
        let waits = |orders: &mut BTreeMap<Ticket, Known>| {
            let known = orders.get(&ticket);
            known.is_some_and(|known| !known.cancelled && known.offers.is_empty())
        };
        let waited = self.orders.0.changed.wait_while(self.orders.lock(), waits);
        let mut orders = waited.unwrap_or_else(PoisonError::into_inner);
        let known = orders.get_mut(&ticket).filter(|known| !known.cancelled)?;
        known.offers.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_has_delivered_much_waits_until_it_is_taken_or_cancelled() {
        let (ticket, delivered) = (Ticket(1), Bytes::gib(1));
        for ends_the_wait in [
            Command::Taken {
                ticket,
                bytes: delivered,
            },
            Command::Cancel(ticket),
        ] {
            let (sender, _received) = channel();
            let orders = Orders::default();
            orders.lock().insert(ticket, Known::default());
            let commands = CardCommands {
                sender,
                orders: orders.clone(),
            };
            let waiting = std::thread::spawn(move || {
                let mut link = ThreadLink {
                    events: |_: Event| {},
                    orders,
                };
                link.wait_until_taken(ticket, Bytes::mib(1));
                link.wait_until_taken(ticket, delivered);
                let known = &link.orders.lock()[&ticket];
                known.cancelled || known.taken == delivered
            });
            let little = Bytes::mib(900);
            commands.send(Command::Taken {
                ticket,
                bytes: little,
            });
            commands.send(Command::Taken {
                ticket: Ticket(2),
                bytes: delivered,
            });
            commands.send(ends_the_wait);
            assert!(waiting.join().unwrap(), "it went on too early");
        }
    }
}
