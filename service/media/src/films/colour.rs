//! RGB to Y'CbCr 4:2:0 in the matrix and the limited range of ITU-R BT.709-6 (section 3, 8 bits).

/// Weights of red, green and blue in luma.
const LUMA: [f64; 3] = [0.2126, 0.7152, 0.0722];
/// Fraction bits of the integer weights.
const BITS: u32 = 16;

/// A picture as the encoder takes it: planes of bytes, both of chroma with half the sides.
#[derive(Clone, Debug)]
pub(super) struct Planes {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) luma: Vec<u8>,
    pub(super) blue: Vec<u8>,
    pub(super) red: Vec<u8>,
    weights: Weights,
}

/// Integer weights of red, green and blue, of [`BITS`] fraction bits.
#[derive(Clone, Copy, Debug)]
struct Weights {
    luma: [i32; 3],
    blue: [i32; 3],
    red: [i32; 3],
}

impl Weights {
    fn new() -> Weights {
        let scaled = |weights: [f64; 3], range: f64| {
            weights.map(|weight| (weight * range / 255.0 * f64::from(1 << BITS)).round() as i32)
        };
        // Cb = (B - Y) / 2 (1 - weight of blue), Cr likewise: both from -0.5 to 0.5.
        let difference = |channel: usize| {
            let mut weights = LUMA.map(|weight| -weight);
            weights[channel] += 1.0;
            weights.map(|weight| weight / (2.0 * (1.0 - LUMA[channel])))
        };
        Weights {
            luma: scaled(LUMA, 219.0),
            blue: scaled(difference(2), 224.0),
            red: scaled(difference(0), 224.0),
        }
    }
}

/// A weighted sum over an offset, rounded; `shift` more fraction bits where the colour is a sum of several.
fn weighed(weights: [i32; 3], rgb: [i32; 3], offset: i32, shift: u32) -> u8 {
    let bits = BITS + shift;
    let sum: i32 = weights
        .iter()
        .zip(rgb)
        .map(|(weight, value)| weight * value)
        .sum();
    let rounded = (sum + (1 << (bits - 1))) >> bits;
    (rounded + offset).clamp(0, 255) as u8
}

impl Planes {
    /// Planes of a picture with even sides.
    pub(super) fn new(width: u32, height: u32) -> Planes {
        let (width, height) = (width as usize, height as usize);
        Planes {
            width,
            height,
            luma: vec![0; width * height],
            blue: vec![0; width * height / 4],
            red: vec![0; width * height / 4],
            weights: Weights::new(),
        }
    }

    /// Fills them from a picture: RGB, 8 bits each, row-major.
    ///
    /// Chroma is sited at the default of H.264: at the left of two columns and between two rows. So three
    /// columns count, the middle one twice, and two rows.
    pub(super) fn fill(&mut self, rgb: &[u8]) {
        let weights = self.weights;
        for (luma, pixel) in self.luma.iter_mut().zip(rgb.chunks_exact(3)) {
            let pixel = [i32::from(pixel[0]), i32::from(pixel[1]), i32::from(pixel[2])];
            *luma = weighed(weights.luma, pixel, 16, 0);
        }
        let row_bytes = 3 * self.width;
        let half = self.width / 2;
        let chroma = self
            .blue
            .chunks_exact_mut(half)
            .zip(self.red.chunks_exact_mut(half));
        for ((blue, red), rows) in chroma.zip(rgb.chunks_exact(2 * row_bytes)) {
            for (column, (blue, red)) in blue.iter_mut().zip(red).enumerate() {
                let middle = 6 * column;
                let left = middle.saturating_sub(3);
                let sum = std::array::from_fn(|channel| {
                    let of_row = |start: usize| {
                        let at = |place: usize| i32::from(rows[start + place + channel]);
                        at(left) + 2 * at(middle) + at(middle + 3)
                    };
                    of_row(0) + of_row(row_bytes)
                });
                *blue = weighed(weights.blue, sum, 128, 3);
                *red = weighed(weights.red, sum, 128, 3);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Y', Cb and Cr of a picture of one colour.
    fn of(rgb: [u8; 3]) -> [u8; 3] {
        let mut planes = Planes::new(4, 2);
        planes.fill(&rgb.repeat(8));
        assert!(planes.luma.iter().all(|luma| *luma == planes.luma[0]));
        [planes.luma[0], planes.blue[1], planes.red[1]]
    }

    #[test]
    fn colours_have_the_codes_of_bt_709() {
        // From the equations of the recommendation, rounded.
        for (rgb, codes) in [
            ([0, 0, 0], [16, 128, 128]),
            ([255, 255, 255], [235, 128, 128]),
            ([255, 0, 0], [63, 102, 240]),
            ([0, 255, 0], [173, 42, 26]),
            ([0, 0, 255], [32, 240, 118]),
            ([128, 128, 128], [126, 128, 128]),
        ] {
            assert_eq!(of(rgb), codes, "{rgb:?}");
        }
    }

    #[test]
    fn chroma_stands_at_the_left_of_its_two_columns() {
        // Red in the second column of four: half of it is seen from the first sample, half from the second.
        let mut planes = Planes::new(4, 2);
        let row = [[0_u8; 3], [255, 0, 0], [0; 3], [0; 3]].concat();
        planes.fill(&row.repeat(2));
        assert_eq!(planes.red[0], planes.red[1]);
        assert_eq!(planes.red[0], 128 + 28);
    }
}
