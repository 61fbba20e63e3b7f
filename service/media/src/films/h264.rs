//! Frames to H.264 by OpenH264: constant quality, one frame in one frame out, no reordering.

use bytes::{BufMut as _, Bytes};
use openh264::encoder::{
    BitRate, Complexity, Encoder as OpenH264, EncoderConfig, FrameRate, FrameType, IntraFramePeriod, QpRange,
    RateControlMode, VuiConfig,
};
use openh264::formats::YUVSource;
use openh264::{OpenH264API, Timestamp};

use super::colour::Planes;
use super::{FilmError, FilmFormat, Sample};

/// The quantizer of every frame, of 51: about 43 dB on detailed pictures, where a difference is hardly seen.
const QUANTIZER: u8 = 18;
/// The encoder has room for as many bytes as a frame has; one of noise takes more with the quantizer of the others. It is encoded
/// with one that is coarser by this, and again by this.
const COARSER: u8 = 8;
const COARSEST: u8 = 51;
/// Seconds between key frames, which players seek to.
const KEY_SECONDS: f32 = 2.0;

/// Types of NAL units (ITU-T H.264, table 7-1).
const SEQUENCE_PARAMETERS: u8 = 7;
const PICTURE_PARAMETERS: u8 = 8;

/// Parameters that a decoder needs before the first frame; the same for all frames of a film.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ParameterSets {
    /// NAL units of a sequence's parameters, without a start code.
    pub(super) sequence: Vec<u8>,
    /// NAL unit of a picture's parameters, without a start code.
    pub(super) picture: Vec<u8>,
}

/// The encoder of one film.
pub(super) struct Encoder {
    inner: OpenH264,
    quantizer: u8,
    planes: Planes,
    sets: ParameterSets,
    /// Frames so far, in the order of encoding.
    count: u64,
    /// Of them those that `inner` encoded.
    of_inner: u64,
    frames_per_second: f32,
}

/// A frame as the encoder gave it.
struct Encoded {
    is_key: bool,
    data: Vec<u8>,
    sets: ParameterSets,
}

impl Encoder {
    pub(super) fn new(format: &FilmFormat) -> Result<Encoder, FilmError> {
        let planes = Planes::new(format.width, format.height);
        Ok(Encoder {
            inner: open(&planes, format.frames_per_second, QUANTIZER)?,
            quantizer: QUANTIZER,
            planes,
            sets: ParameterSets::default(),
            count: 0,
            of_inner: 0,
            frames_per_second: format.frames_per_second,
        })
    }

    /// Encodes a frame: RGB, 8 bits each, row-major. As a key frame, nothing before it is needed.
    pub(super) fn encode(&mut self, rgb: &[u8], as_key: bool) -> Result<Sample, FilmError> {
        self.planes.fill(rgb);
        if self.quantizer > QUANTIZER && self.of_inner >= u64::from(key_interval(self.frames_per_second)) {
            self.reopen(QUANTIZER)?;
        }
        let encoded = loop {
            match self.encode_planes(as_key) {
                Ok(encoded) => break encoded,
                Err(error) if self.quantizer == COARSEST => return Err(error),
                Err(_) => self.reopen((self.quantizer + COARSER).min(COARSEST))?,
            }
        };
        let Encoded { is_key, data, sets } = encoded;
        if as_key && !is_key {
            return Err(FilmError::Encoder("a key frame was refused".to_owned()));
        }
        self.keep(sets)?;
        if data.is_empty() {
            return Err(FilmError::Encoder("a frame was left out".to_owned()));
        }
        self.count += 1;
        self.of_inner += 1;
        Ok(Sample {
            data: Bytes::from(data),
            is_key,
        })
    }

    /// Goes on with another quantizer. The next frame is a key frame.
    fn reopen(&mut self, quantizer: u8) -> Result<(), FilmError> {
        self.inner = open(&self.planes, self.frames_per_second, quantizer)?;
        (self.quantizer, self.of_inner) = (quantizer, 0);
        Ok(())
    }

    fn encode_planes(&mut self, as_key: bool) -> Result<Encoded, FilmError> {
        // The encoder makes a key frame of the first frame by itself. Before that frame it has no state that could be set.
        if as_key && self.of_inner > 0 {
            self.inner.force_intra_frame();
        }
        let milliseconds = self.of_inner as f64 * 1000.0 / f64::from(self.frames_per_second);
        let time = Timestamp::from_millis(milliseconds as u64);
        let encoded = self.inner.encode_at(&self.planes, time).map_err(failed)?;
        let is_key = match encoded.frame_type() {
            FrameType::IDR => true,
            FrameType::P => false,
            other => return Err(FilmError::Encoder(format!("a frame became {other:?}"))),
        };
        let mut data = Vec::new();
        let mut sets = ParameterSets::default();
        let layers = (0..encoded.num_layers()).filter_map(|index| encoded.layer(index));
        for layer in layers {
            for unit in (0..layer.nal_count()).filter_map(|index| layer.nal_unit(index)) {
                let unit = without_start_code(unit);
                match unit.first().map(|byte| byte & 0x1f) {
                    Some(SEQUENCE_PARAMETERS) => sets.sequence = unit.to_vec(),
                    Some(PICTURE_PARAMETERS) => sets.picture = unit.to_vec(),
                    Some(_) => {
                        data.put_u32(unit.len() as u32);
                        data.put_slice(unit);
                    }
                    None => {}
                }
            }
        }
        Ok(Encoded { is_key, data, sets })
    }

    /// Keeps the parameters, which are those of every group: a file has them once.
    fn keep(&mut self, sets: ParameterSets) -> Result<(), FilmError> {
        if sets == ParameterSets::default() || sets == self.sets {
            return Ok(());
        }
        if self.count > 0 {
            return Err(FilmError::Encoder("its parameters changed in a film".to_owned()));
        }
        self.sets = sets;
        Ok(())
    }

    /// The parameters of the film.
    ///
    /// # Errors
    /// Before the first frame.
    pub(super) fn parameter_sets(&self) -> Result<ParameterSets, FilmError> {
        if self.sets.sequence.len() < 4 || self.sets.picture.is_empty() {
            return Err(FilmError::Encoder("it gave no parameters".to_owned()));
        }
        Ok(self.sets.clone())
    }
}

/// OpenH264 for frames of this size, with a constant quantizer.
fn open(planes: &Planes, rate: f32, quantizer: u8) -> Result<OpenH264, FilmError> {
    // This does not limit the rate, as the quantizer is constant. It determines the level in the file.
    let bits_per_second = (planes.width * planes.height) as f64 * f64::from(rate) * 0.25;
    let config = EncoderConfig::new()
        // With bounds that are equal this is a constant quantizer; the mode named `Off` has another for key frames.
        .rate_control_mode(RateControlMode::Bufferbased)
        .qp(QpRange::new(quantizer, quantizer))
        .bitrate(BitRate::from_bps(bits_per_second.clamp(1e4, 1e8) as u32))
        .max_frame_rate(FrameRate::from_hz(rate))
        .intra_frame_period(IntraFramePeriod::from_num_frames(key_interval(rate)))
        .complexity(Complexity::Medium)
        .skip_frames(false)
        .scene_change_detect(false)
        .adaptive_quantization(false)
        .background_detection(false)
        .num_threads(1)
        .vui(VuiConfig::bt709());
    OpenH264::with_api_config(OpenH264API::from_source(), config).map_err(failed)
}

/// Frames from one key frame to the next.
fn key_interval(rate: f32) -> u32 {
    (KEY_SECONDS * rate).ceil().max(1.0) as u32
}

fn failed(problem: openh264::Error) -> FilmError {
    FilmError::Encoder(problem.to_string())
}

/// A NAL unit without the start code in front of it (ITU-T H.264, annex B).
fn without_start_code(unit: &[u8]) -> &[u8] {
    unit.strip_prefix(&[0, 0, 0, 1])
        .or_else(|| unit.strip_prefix(&[0, 0, 1]))
        .unwrap_or(unit)
}

impl YUVSource for Planes {
    fn dimensions(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    fn strides(&self) -> (usize, usize, usize) {
        (self.width, self.width / 2, self.width / 2)
    }

    fn y(&self) -> &[u8] {
        &self.luma
    }

    fn u(&self) -> &[u8] {
        &self.blue
    }

    fn v(&self) -> &[u8] {
        &self.red
    }
}
