//! Numbers in messages that are none of their enum: protobuf takes any.

/// A number that this version does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownNumber {
    /// Path of the field: `options.priority`.
    pub field: String,
    pub number: i32,
}

/// A message that may have enums, in itself or in the messages in it. Written for each by `build.rs`.
pub trait Enums {
    /// Adds the numbers that this version does not know; `at` is the path of the message itself, with a dot behind it.
    fn unknown_numbers(&self, at: &str, found: &mut Vec<UnknownNumber>) {
        let _ = (at, found); // it has no enums
    }
}

/// Most numbers that are collected: a message may have a million.
const MOST: usize = 100;

fn look_at_number<E: TryFrom<i32>>(number: i32, field: String, found: &mut Vec<UnknownNumber>) {
    if E::try_from(number).is_err() && found.len() < MOST {
        found.push(UnknownNumber { field, number });
    }
}

include!(concat!(env!("OUT_DIR"), "/enums.rs"));
