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
        let group = self.rotation.group();
        if group > 1 {
            out.chunks_exact_mut(group).for_each(turn_back);
        }
    }
}

/// Multiplies a group by its Hadamard matrix over the matrix' square root, in one pass for each factor of four: every number
/// becomes the sum of its four less twice the one opposite. Sums are of pairs of neighbours, as a card's lanes add them.
fn turn_back(group: &mut [f32]) {
    let mut apart = 1;
    while apart < group.len() {
        for first in (0..group.len()).step_by(4 * apart) {
            for at in first..first + apart {
                let four = [0, 1, 2, 3].map(|place| group[at + place * apart]);
                let sum = (four[0] + four[1]) + (four[2] + four[3]);
                for place in 0..4 {
                    group[at + place * apart] = sum - 2.0 * four[3 - place];
                }
            }
        }
        apart *= 4;
    }
    // The square root of a power of four is a power of two: exact.
    let factor = 1.0 / (group.len() as f32).sqrt();
    group.iter_mut().for_each(|number| *number *= factor);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_the_regular_hadamard_matrix_and_its_own_inverse() {
        let mut four = [1.0, 0.0, 0.0, 0.0];
        turn_back(&mut four);
        assert_eq!(four, [0.5, 0.5, 0.5, -0.5]);
        for size in [16, 64, 256] {
            let original: Vec<f32> = (0..size).map(|i| (i * i % 23) as f32 - 11.0).collect();
            let mut turned = original.clone();
            turn_back(&mut turned);
            assert_ne!(turned, original);
            turn_back(&mut turned);
            let apart = turned.iter().zip(&original).map(|(a, b)| (a - b).abs());
            assert!(apart.fold(0.0, f32::max) < 1e-5, "{size}");
        }
    }
}
