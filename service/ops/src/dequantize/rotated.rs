//! Rotated weights: groups of columns were multiplied by a Hadamard matrix before they were quantized, and are multiplied by it
//! again, which turns them back.

use gpu::Rotation;

use super::ReadCodes;

/// A weight whose groups of columns are turned back after they are read.
pub(super) struct Rotated<T> {
    read: T,
    rotation: Rotation,
}

impl<T> Rotated<T> {
    pub(super) fn new(read: T, rotation: Rotation) -> Rotated<T> {
        Rotated { read, rotation }
    }
}

impl<T: ReadCodes> ReadCodes for Rotated<T> {
    // Pieces are multiples of every group, and groups do not cross the ends of rows.
    fn read(&self, first: usize, out: &mut [f32]) {
        self.read.read(first, out);
        self.rotation.turn(out);
    }
}
