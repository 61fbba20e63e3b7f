//! Inputs of stages on their way to a worker. A stage often has the same values as the stage before it: the text of each item, the
//! condition of each round, the sections of a film so far. So values that a worker received recently are named by a number and
//! not sent again.
//!
//! Both ends keep the same list by the same rule, command by command, so that a position in it means the same bytes in both.

use std::collections::VecDeque;

use bytes::Bytes;
use engine::messages::Command;
use serde::{Deserialize, Serialize};

/// Shorter values are always sent, as the search for them costs about as much.
const SHORTEST_BYTES: usize = 16 << 10;
/// Bytes of values that a worker keeps for later commands.
const KEPT_BYTES: usize = 64 << 20;

/// A command as it goes over the pipe.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SentCommand {
    /// Numbers of inputs that will not be named any more: the supervisor has dropped their bytes.
    released: Vec<u64>,
    /// For each input of the command, in order: its number if the worker has its bytes, which the command then lacks.
    known: Vec<Option<u64>>,
    command: Box<Command>,
}

/// A command names bytes that its worker does not have.
#[derive(Debug, thiserror::Error)]
#[error("a command names input {0}, which was not sent before or is not kept any more")]
pub(super) struct UnknownInput(u64);

/// The inputs that were sent last, with their numbers; the most recently used are at the end.
#[derive(Debug)]
pub(super) struct RecentInputs {
    kept: VecDeque<(u64, Bytes)>,
    /// Number of the next input.
    next: u64,
    /// Most bytes that are kept.
    bound: usize,
}

impl Default for RecentInputs {
    fn default() -> RecentInputs {
        RecentInputs::within(KEPT_BYTES)
    }
}

impl RecentInputs {
    fn within(bound: usize) -> RecentInputs {
        RecentInputs {
            kept: VecDeque::new(),
            next: 0,
            bound,
        }
    }

    /// Removes the bytes from a command that its worker has already.
    pub(super) fn send(&mut self, mut command: Box<Command>) -> SentCommand {
        let unshared = self.kept.iter().filter(|(_, data)| data.is_unique());
        let released: Vec<u64> = unshared.map(|(number, _)| *number).collect();
        self.release(&released);
        let mut known = Vec::new();
        for data in command.inputs_mut() {
            let number = self.number_of(data);
            match number.and_then(|number| self.use_again(number)) {
                Some(_) => *data = Bytes::new(),
                None => self.keep(data),
            }
            known.push(number);
        }
        SentCommand {
            released,
            known,
            command,
        }
    }

    /// The command with all its inputs.
    ///
    /// # Errors
    /// [`UnknownInput`], which is a fault of the program: both ends are one build.
    pub(super) fn receive(&mut self, sent: SentCommand) -> Result<Box<Command>, UnknownInput> {
        let SentCommand {
            released,
            known,
            mut command,
        } = sent;
        self.release(&released);
        for (data, number) in command.inputs_mut().zip(known) {
            match number {
                Some(number) => *data = self.use_again(number).ok_or(UnknownInput(number))?,
                None => self.keep(data),
            }
        }
        Ok(command)
    }

    /// The number of an input with the same bytes. It is found by the address, which no other bytes can have while these are kept.
    fn number_of(&self, data: &Bytes) -> Option<u64> {
        let is_same = |kept: &Bytes| kept.as_ptr() == data.as_ptr() && kept.len() == data.len();
        let found = self.kept.iter().find(|(_, kept)| is_same(kept));
        found.map(|(number, _)| *number)
    }

    /// Moves an input to the end, and returns its bytes.
    fn use_again(&mut self, number: u64) -> Option<Bytes> {
        let place = self.kept.iter().position(|(kept, _)| *kept == number)?;
        let (number, data) = self.kept.remove(place)?;
        self.kept.push_back((number, data.clone()));
        Some(data)
    }

    /// Keeps an input for later commands, and drops the least recently used ones beyond the bound.
    fn keep(&mut self, data: &Bytes) {
        if !(SHORTEST_BYTES..=self.bound).contains(&data.len()) {
            return;
        }
        self.kept.push_back((self.next, data.clone()));
        self.next += 1;
        let mut bytes: usize = self.kept.iter().map(|(_, data)| data.len()).sum();
        while bytes > self.bound {
            bytes -= self.kept.pop_front().map_or(bytes, |(_, data)| data.len());
        }
    }

    fn release(&mut self, released: &[u64]) {
        self.kept.retain(|(number, _)| !released.contains(number));
    }
}

#[cfg(test)]
mod tests;
