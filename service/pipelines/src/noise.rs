//! Reproducible noise: `torch.randn` of `torch.Generator("cpu").manual_seed(seed)`.
//!
//! A Mersenne Twister (MT19937, 32 bits) whose output PyTorch transforms to normal numbers in two ways: sixteen or
//! more at a time in f32, by blocks of sixteen; fewer one by one in f64. Both are implemented, and a generator keeps
//! its state between draws, so that several draws give the same sequence as PyTorch's.

/// State size in words.
const STATE: usize = 624;
/// The recurrence's offset.
const SHIFT: usize = 397;
/// Block size of torch's vectorized transformation.
const BLOCK: usize = 16;

/// A CPU generator of PyTorch.
pub struct Generator {
    state: [u32; STATE],
    next: usize,
    /// The second of a pair of normal numbers, when only the first was returned.
    kept: Option<f64>,
}

impl Generator {
    /// `torch.Generator("cpu").manual_seed(seed)`. The twister takes the low 32 bits of the seed.
    pub fn new(seed: u64) -> Generator {
        let mut state = [0u32; STATE];
        state[0] = seed as u32;
        for i in 1..STATE {
            let previous = state[i - 1];
            state[i] = 1_812_433_253u32
                .wrapping_mul(previous ^ (previous >> 30))
                .wrapping_add(i as u32);
        }
        Generator {
            state,
            next: STATE,
            kept: None,
        }
    }

    /// `torch.randn(count, generator=self)`: f32, mean 0, standard deviation 1.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        if count < BLOCK {
            return (0..count).map(|_| self.one_normal() as f32).collect();
        }
        let mut numbers: Vec<f32> = (0..count).map(|_| self.uniform()).collect();
        numbers.chunks_exact_mut(BLOCK).for_each(transform);
        if !count.is_multiple_of(BLOCK) {
            // The last sixteen are drawn again, and overwrite the previous values.
            let last = &mut numbers[count - BLOCK..];
            last.iter_mut().for_each(|number| *number = self.uniform());
            transform(last);
        }
        numbers
    }

    /// Draws as [`Generator::normal`] does, and discards the numbers.
    pub fn skip_normal(&mut self, count: usize) {
        if count < BLOCK {
            self.normal(count);
            return;
        }
        let again = if count.is_multiple_of(BLOCK) { 0 } else { BLOCK };
        for _ in 0..count + again {
            self.bits();
        }
    }

    /// One normal number in f64; every second call returns the second of a pair.
    fn one_normal(&mut self) -> f64 {
        if let Some(kept) = self.kept.take() {
            return kept;
        }
        let (angle, length) = (self.uniform_f64(), self.uniform_f64());
        let radius = (-2.0 * (-length).ln_1p()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * angle).sin_cos();
        self.kept = Some(radius * sin);
        radius * cos
    }

    /// Uniform in [0, 1), in steps of 2^-24.
    fn uniform(&mut self) -> f32 {
        (self.bits() & 0x00FF_FFFF) as f32 / (1u32 << 24) as f32
    }

    /// Uniform in [0, 1), in steps of 2^-53.
    fn uniform_f64(&mut self) -> f64 {
        let high = u64::from(self.bits());
        let low = u64::from(self.bits());
        ((high << 32 | low) & ((1 << 53) - 1)) as f64 / (1u64 << 53) as f64
    }

    /// The twister's next 32 bits.
    fn bits(&mut self) -> u32 {
        if self.next == STATE {
            self.twist();
        }
        let mut bits = self.state[self.next];
        self.next += 1;
        bits ^= bits >> 11;
        bits ^= (bits << 7) & 0x9D2C_5680;
        bits ^= (bits << 15) & 0xEFC6_0000;
        bits ^ (bits >> 18)
    }

    /// Generates the next 624 words of state.
    fn twist(&mut self) {
        for i in 0..STATE {
            let joined = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % STATE] & 0x7FFF_FFFF);
            let factor = if joined & 1 == 1 { 0x9908_B0DF } else { 0 };
            self.state[i] = self.state[(i + SHIFT) % STATE] ^ (joined >> 1) ^ factor;
        }
        self.next = 0;
    }
}

/// Box-Muller transform of sixteen uniform numbers: eight radii, eight angles; eight cosines, then eight sines.
fn transform(block: &mut [f32]) {
    let (radii, angles) = block.split_at_mut(BLOCK / 2);
    for (radius, angle) in radii.iter_mut().zip(angles) {
        let length = (-2.0 * (1.0 - *radius).ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * *angle).sin_cos();
        (*radius, *angle) = (length * cos, length * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_equals_the_published_mt19937() {
        // The first word of mt19937 seeded with 5489; the 10,000th is specified by the C++ standard.
        let mut generator = Generator::new(5489);
        let words: Vec<u32> = (0..10_000).map(|_| generator.bits()).collect();
        assert_eq!((words[0], words[9_999]), (3_499_211_612, 4_123_659_995));
    }

    #[test]
    fn skipping_leaves_the_generator_as_drawing_does() {
        for count in [1, 3, 15, 16, 17, 32, 700] {
            let (mut drawn, mut skipped) = (Generator::new(7), Generator::new(7));
            drawn.normal(count);
            skipped.skip_normal(count);
            assert_eq!(drawn.normal(20), skipped.normal(20), "{count}");
        }
    }

    #[test]
    fn only_the_low_32_bits_of_a_seed_count() {
        assert_eq!(
            Generator::new(5).normal(40),
            Generator::new(5 + (9 << 32)).normal(40)
        );
    }
}
