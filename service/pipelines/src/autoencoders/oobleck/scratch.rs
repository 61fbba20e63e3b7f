//! Activation memory of a decode or an encode, derived from the configuration, and the rungs that need less.

use candle_core::DType;
use model::plan::ladder;
use ops::{Planned, SequenceShape, allocated};
use residency::Bytes;

use super::config::OobleckConfig;
use super::table::{Layer, dilated};
use super::windows::{Margins, Windows, window_frames, windows_of};
use crate::Rung;

/// Most latent frames of a window: with ACE-Step's autoencoder in bf16, 0.9 GiB.
const MOST_FRAMES: usize = 512;

/// Lengths of windows are multiples of this. So there are few lengths, whose plans are kept, and the one for which the fewest
/// frames are computed twice is close to the best length.
const STEP_FRAMES: usize = 32;

/// The ladder of rungs for decoding `frames` latent frames, best first, each predicted to need less memory than the one
/// before it. All give the same result.
pub fn decode_ladder(config: &OobleckConfig, frames: usize, dtype: DType) -> Vec<(Windows, Rung)> {
    rungs(frames, config.decode_margins(), |windows| {
        decode_scratch(config, frames, windows, dtype)
    })
}

/// The ladder for encoding `samples` samples per channel.
pub fn encode_ladder(config: &OobleckConfig, samples: usize, dtype: DType) -> Vec<(Windows, Rung)> {
    let frames = samples.div_ceil(config.hop().max(1));
    rungs(frames, config.encode_margins(), |windows| {
        encode_scratch(config, samples, windows, dtype)
    })
}

fn rungs(frames: usize, margins: Margins, scratch: impl Fn(Windows) -> Bytes) -> Vec<(Windows, Rung)> {
    let whole = (frames <= MOST_FRAMES).then_some(Windows::Whole);
    let least = margins.before + margins.after + 1;
    let mut of_windows = Vec::new();
    let mut most = MOST_FRAMES;
    while most > least {
        of_windows.push(Windows::Of {
            frames: best_length(frames, most, margins),
        });
        most /= 2;
    }
    of_windows.push(Windows::Of { frames: least });
    ladder(whole.into_iter().chain(of_windows), |windows| {
        Rung::new(windows.label(), scratch(windows))
    })
}

/// The length of windows, from half of `most` on, for which the windows of a track have the fewest frames in all.
fn best_length(frames: usize, most: usize, margins: Margins) -> usize {
    let lengths = (most / 2..=most)
        .rev()
        .filter(|length| *length == most || length.is_multiple_of(STEP_FRAMES));
    let computed = |length: &usize| {
        windows_of(frames, 0..frames, Windows::Of { frames: *length }, margins).len() * length
    };
    lengths.min_by_key(computed).unwrap_or(most)
}

/// Predicted peak of activation bytes of decoding `frames` latent frames: filters, a window, and the latents and the
/// samples of a piece on the device.
pub fn decode_scratch(config: &OobleckConfig, frames: usize, windows: Windows, dtype: DType) -> Bytes {
    let account = decode_account(config, frames, windows, dtype);
    let latents = allocated(frames * config.decoder_input_channels * size_of::<f32>());
    Bytes(account.filters + latents + account.peak)
}

/// Predicted peak of activation bytes of encoding `samples` samples per channel: filters, a window, and its samples.
pub fn encode_scratch(config: &OobleckConfig, samples: usize, windows: Windows, dtype: DType) -> Bytes {
    let account = encode_account(config, samples, windows, dtype);
    Bytes(account.filters + account.peak)
}

/// Tracks live bytes of a window, or of a whole sequence, layer by layer, and the layers that were passed.
pub(in crate::autoencoders) struct Account {
    dtype: DType,
    filters: u64,
    peak: u64,
    /// Shapes of all convolutions for which cuDNN may have a plan.
    pub(in crate::autoencoders) planned: Vec<Planned>,
}

impl Account {
    pub(in crate::autoencoders) fn new(dtype: DType) -> Account {
        Account {
            dtype,
            filters: 0,
            peak: 0,
            planned: Vec::new(),
        }
    }

    pub(in crate::autoencoders) fn note(&mut self, alive: u64) {
        self.peak = self.peak.max(alive);
    }

    /// The dtype of sequences.
    pub(in crate::autoencoders) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Filters, and the most that was alive beside them.
    pub(in crate::autoencoders) fn total(&self) -> Bytes {
        Bytes(self.filters + self.peak)
    }

    /// Dtypes narrower than f32 imply a card: the CPU computes in f32.
    fn on_card(&self) -> bool {
        self.dtype.size_in_bytes() < 4
    }

    pub(in crate::autoencoders) fn bytes(&self, rows: usize, channels: usize) -> u64 {
        allocated(rows * channels * self.dtype.size_in_bytes())
    }

    pub(in crate::autoencoders) fn filter(&mut self, shape: SequenceShape) {
        self.filters += allocated(shape.filter_numbers() * self.dtype.size_in_bytes());
    }

    /// A convolution of `rows` rows into a new sequence. Returns the length and the bytes of the new sequence. `held` are the
    /// bytes of the sequence that is read; `stays` says whether it is kept.
    pub(in crate::autoencoders) fn convolve(
        &mut self,
        shape: SequenceShape,
        (rows, held, stays): (usize, u64, bool),
        has_bias: bool,
    ) -> (usize, u64) {
        self.filter(shape);
        let Some(reach) = shape.reach(rows) else {
            return (0, 0);
        };
        let read = self.bytes(reach.read, shape.inputs);
        let written = self.bytes(reach.written, shape.outputs);
        self.note(held + read);
        let besides = match self.on_card() {
            true => shape.scratch(rows, self.dtype) as u64,
            false => 0,
        };
        let stays = if stays { held } else { 0 };
        self.note(stays + read + written + besides);
        if let Some(planned) = shape.planned(rows, self.dtype, has_bias)
            && !self.planned.contains(&planned)
        {
            self.planned.push(planned);
        }
        (reach.length, written)
    }

    /// A sequence of `rows` rows through all layers: the rows of the last one, and its bytes.
    fn pass(&mut self, layers: &[Layer], (mut rows, mut held): (usize, u64)) -> (usize, u64) {
        for layer in layers {
            match *layer {
                Layer::Convolution { shape, has_bias, .. } => {
                    (rows, held) = self.convolve(shape, (rows, held, false), has_bias);
                }
                Layer::Unit { channels, .. } => {
                    self.convolve(layer.shape(), (rows, held, true), true);
                    self.filter(dilated(channels, channels, 1, 1));
                }
            }
        }
        (rows, held)
    }
}

/// Account of decoding a window.
pub(super) fn decode_account(
    config: &OobleckConfig,
    frames: usize,
    windows: Windows,
    dtype: DType,
) -> Account {
    let mut account = Account::new(dtype);
    let frames = window_frames(frames, windows, config.decode_margins());
    let latents = account.bytes(frames, config.decoder_input_channels);
    let (rows, held) = account.pass(&config.decoder(), (frames, latents));
    account.note(held + allocated(rows * config.audio_channels * size_of::<f32>()));
    account
}

/// Account of encoding a window.
pub(super) fn encode_account(
    config: &OobleckConfig,
    samples: usize,
    windows: Windows,
    dtype: DType,
) -> Account {
    let mut account = Account::new(dtype);
    let hop = config.hop().max(1);
    let frames = window_frames(samples.div_ceil(hop), windows, config.encode_margins());
    let length = (frames * hop).min(samples);
    let samples = allocated(length * config.audio_channels * size_of::<f32>());
    let held = account.bytes(length, config.sample_channels());
    account.note(samples + held);
    let (rows, held) = account.pass(&config.encoder(), (length, held));
    account.note(held + allocated(rows * config.encoder_hidden_size * size_of::<f32>()));
    account
}

impl OobleckConfig {
    /// Shapes for which cuDNN is used to decode `frames` latent frames with sequences of this dtype. Each shape once, in order
    /// of use: all windows have the same.
    pub fn planned_to_decode(&self, frames: usize, windows: Windows, dtype: DType) -> Vec<Planned> {
        decode_account(self, frames, windows, dtype).planned
    }

    /// Shapes for which it is used to encode `samples` samples per channel. If the number is no multiple of a frame's samples,
    /// the last window is shorter; its shapes are not listed.
    pub fn planned_to_encode(&self, samples: usize, windows: Windows, dtype: DType) -> Vec<Planned> {
        encode_account(self, samples, windows, dtype).planned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ace_step() -> OobleckConfig {
        OobleckConfig {
            downsampling_ratios: vec![2, 4, 4, 6, 10],
            sampling_rate: 48000,
            ..OobleckConfig::default()
        }
    }

    fn check(ladder: &[(Windows, Rung)]) {
        let gibibytes = |rung: &Rung| rung.scratch.0 as f64 / f64::from(1 << 30);
        for (_, rung) in ladder {
            println!("{}: {:.3} GiB", rung.label, gibibytes(rung));
        }
        assert!(gibibytes(&ladder[0].1) <= 1.0);
        assert!(ladder.is_sorted_by(|(_, a), (_, b)| a.scratch > b.scratch));
        assert!(gibibytes(&ladder[ladder.len() - 1].1) < 0.3);
        assert!(ladder.iter().all(|(_, rung)| !rung.approximate));
    }

    #[test]
    fn four_minutes_fit_into_a_gibibyte() {
        let config = ace_step();
        check(&decode_ladder(&config, 6000, DType::BF16));
        check(&encode_ladder(&config, 6000 * 1920, DType::BF16));
    }

    #[test]
    fn a_short_track_is_processed_whole() {
        let ladder = decode_ladder(&ace_step(), 250, DType::BF16);
        assert_eq!(ladder[0].0, Windows::Whole);
        assert_eq!(decode_ladder(&ace_step(), 1, DType::BF16).len(), 1);
        check(&ladder);
    }

    #[test]
    fn windows_of_a_long_track_compute_few_frames_twice() {
        for frames in [600, 750, 1500, 3000, 6000, 15000] {
            let margins = ace_step().decode_margins();
            let (windows, _) = decode_ladder(&ace_step(), frames, DType::BF16)[0];
            let computed: usize = windows_of(frames, 0..frames, windows, margins)
                .iter()
                .map(|window| window.end - window.first)
                .sum();
            assert!(computed * 100 <= frames * 112, "{computed} for {frames}");
        }
    }
}
