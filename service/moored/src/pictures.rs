//! Encoding and decoding of pictures: PNG with their recipe, init images within limits, previews as JPEG.

#[cfg(test)]
mod any_bytes;
mod exif;

use std::io::Cursor;

use bytes::Bytes;
use engine::library::Entry;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageEncoder, ImageReader, Limits};
use pipelines::{AdapterUse, Audio, AudioTask, Image, Medium, Request, Video};
use serde::{Deserialize, Serialize};

use crate::{films, tracks};

/// Longest side of a picture that a client may send.
const LONGEST_SIDE_PIXELS: u32 = 8192;
/// Bytes that decoding a picture may take, against decompression bombs.
const DECODE_LIMIT_BYTES: u64 = 256 << 20;
/// Longest side of a preview.
const PREVIEW_SIDE_PIXELS: u32 = 512;
const PREVIEW_JPEG_QUALITY: u8 = 80;
/// Name of the PNG text chunk that holds [`Recipe`] as JSON.
const RECIPE_KEYWORD: &str = "moored";
/// More than any recipe that moored writes: prompts and lyrics are bounded.
const LONGEST_RECIPE_BYTES: usize = 4 << 20;
/// Name of the chunk that holds it as other tools write it.
const PARAMETERS_KEYWORD: &str = "parameters";
/// JPEG quality of pictures, of 100.
const JPEG_QUALITY: u8 = 95;

/// A picture as pixels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pixels {
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// RGB, 8 bits each, row-major.
    pub(crate) rgb: Vec<u8>,
}

/// Settings of a result: enough to reproduce it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Recipe {
    pub(crate) prompt: String,
    pub(crate) seed: u64,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) steps: u32,
    pub(crate) guidance: f32,
    pub(crate) max_sequence_length: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) strength: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) frames: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) frames_per_second: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) lyrics: String,
    /// What was made of a source: `repaint`, `cover`, `extract`, `lego` or `complete`; empty for a new track.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) task: String,
    /// Tracks that the task names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tracks: Vec<String>,
    /// Seconds and strengths of the parts of a track; empty for one strength.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) strengths: Vec<(f32, f32)>,
    /// Start and end of the part that was made anew, in seconds; without an end it goes to that of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) window: Option<(f32, Option<f32>)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bpm: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) time_signature: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) language: String,
    /// Id of the model.
    pub(crate) model: String,
    /// Entry key: revision and quantization too.
    pub(crate) model_key: String,
    /// Adapters, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) adapters: Vec<RecipeAdapter>,
    /// Pictures that the request had besides a start, and that the recipe does not hold: `mask`, `reference`, `control`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) pictures: Vec<String>,
    /// Tracks that the request had, and that the recipe does not hold: `source`, `reference`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sounds: Vec<String>,
    /// Version of the service.
    pub(crate) version: String,
}

/// An adapter in a [`Recipe`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecipeAdapter {
    pub(crate) id: String,
    /// In every step; with a curve, that of the first.
    pub(crate) strength: f32,
    /// Points of position and strength; empty for one strength.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) curve: Vec<(f32, f32)>,
    /// Absent: as `strength`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) text_strength: Option<f32>,
    /// Tensors that are of no layer of the model were ignored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) ignore_unknown: bool,
}

impl RecipeAdapter {
    fn of(each: &AdapterUse, entry: &Entry) -> RecipeAdapter {
        let mut files = entry.adapters.iter();
        let strength = each.strength.first();
        RecipeAdapter {
            id: each.name.clone(),
            strength,
            curve: match each.strength.is_constant() {
                true => Vec::new(),
                false => each.strength.points().to_vec(),
            },
            text_strength: (each.text_strength != strength).then_some(each.text_strength),
            ignore_unknown: files.any(|file| file.name == each.name && file.ignores_unknown),
        }
    }
}

impl Recipe {
    /// The recipe of a request to a model. Every field of a request is named here, so that a new one is decided about.
    pub(crate) fn of(request: &Request, entry: &Entry, from_latent: bool) -> Recipe {
        let Request {
            prompt,
            steps,
            guidance,
            seed,
            max_sequence_length,
            strength,
            preview: _,
            from_values: _,
            adapters,
            slots: _,
            medium,
        } = request;
        let (width, height) = medium.size().unwrap_or_default();
        let adapters = adapters.iter().map(|each| RecipeAdapter::of(each, entry));
        let mut recipe = Recipe {
            prompt: prompt.clone(),
            seed: *seed,
            width,
            height,
            steps: *steps,
            guidance: *guidance,
            max_sequence_length: *max_sequence_length,
            model: entry.id.clone(),
            model_key: entry.base_key().to_owned(),
            adapters: adapters.collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Recipe::default()
        };
        let starts = match medium {
            Medium::Image(image) => recipe.set_picture(image),
            Medium::Video(video) => recipe.set_film(video),
            Medium::Audio(audio) => recipe.set_track(audio),
        };
        recipe.strength = (starts || from_latent).then_some(*strength);
        recipe
    }

    /// Takes what is a picture's own. Whether it begins at a picture.
    fn set_picture(&mut self, image: &Image) -> bool {
        let Image {
            width: _,
            height: _,
            init_image,
            mask,
            references,
            controls,
        } = image;
        self.pictures = given([
            ("mask", mask.is_some()),
            ("reference", !references.is_empty()),
            ("control", !controls.is_empty()),
        ]);
        init_image.is_some()
    }

    /// Takes what is a film's own. Whether it begins at a picture or a film.
    fn set_film(&mut self, video: &Video) -> bool {
        let Video {
            width: _,
            height: _,
            frames,
            frames_per_second,
            frames_at_a_time: _,
            init_image,
            init_video,
        } = video;
        self.frames = Some(*frames);
        self.frames_per_second = Some(*frames_per_second);
        init_image.is_some() || init_video.is_some()
    }

    /// Takes what is a track's own. Whether it begins at a track.
    fn set_track(&mut self, audio: &Audio) -> bool {
        let Audio {
            seconds,
            lyrics,
            init_audio,
            reference,
            task,
            beats_per_minute,
            key,
            time_signature,
            language,
            strengths,
            decode_from_seconds: _,
        } = audio;
        self.seconds = Some(*seconds);
        self.lyrics.clone_from(lyrics);
        (self.bpm, self.key) = (*beats_per_minute, key.clone());
        (self.time_signature, self.language) = (time_signature.clone(), language.clone());
        let points = strengths.iter().map(|point| (point.seconds, point.strength));
        self.strengths = points.collect();
        if *task != AudioTask::TextToMusic {
            task.name().clone_into(&mut self.task);
        }
        match task {
            AudioTask::TextToMusic | AudioTask::Cover => {}
            &AudioTask::Repaint {
                start_seconds,
                end_seconds,
            } => self.window = Some(window_of(start_seconds, end_seconds)),
            AudioTask::Extract { track } => self.tracks = vec![track.clone()],
            AudioTask::Lego {
                track,
                start_seconds,
                end_seconds,
            } => {
                self.tracks = vec![track.clone()];
                self.window = Some(window_of(*start_seconds, *end_seconds));
            }
            AudioTask::Complete { tracks } => self.tracks.clone_from(tracks),
        }
        self.sounds = given([
            ("source", init_audio.is_some()),
            ("reference", reference.is_some()),
        ]);
        init_audio.is_some()
    }
}

/// A window as a recipe has it: JSON has no infinite number.
fn window_of(start_seconds: f32, end_seconds: f32) -> (f32, Option<f32>) {
    (start_seconds, Some(end_seconds).filter(|end| end.is_finite()))
}

/// The names of what was given.
fn given<const N: usize>(named: [(&str, bool); N]) -> Vec<String> {
    let given = named.into_iter().filter(|(_, is_given)| *is_given);
    given.map(|(name, _)| name.to_owned()).collect()
}

/// The recipe as other tools read it, in the form of web UIs for Stable Diffusion: the prompt, and a line of settings. The
/// Python client writes the same (`client-py/src/moored/_saving.py`). There is no negative prompt to write.
fn parameters(recipe: &Recipe) -> String {
    let (width, height) = (recipe.width, recipe.height);
    let settings = [
        ("Steps", Some(recipe.steps.to_string())),
        ("Sampler", Some("Euler".to_owned())),
        ("CFG scale", Some(recipe.guidance.to_string())),
        ("Seed", Some(recipe.seed.to_string())),
        ("Size", (width > 0).then(|| format!("{width}x{height}"))),
        ("Model", (!recipe.model.is_empty()).then(|| recipe.model.clone())),
        (
            "Denoising strength",
            recipe.strength.map(|strength| strength.to_string()),
        ),
        (
            "Version",
            (!recipe.version.is_empty()).then(|| format!("moored {}", recipe.version)),
        ),
    ];
    let settings: Vec<String> = settings
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name}: {}", quoted(value?))))
        .collect();
    let line = settings.join(", ");
    let text = match recipe.prompt.is_empty() {
        true => line,
        false => format!("{}\n{line}", recipe.prompt),
    };
    text.replace('\0', "") // a text of PNG has none
}

/// A value, as a JSON string where a reader would take a part of it for the next setting.
fn quoted(value: String) -> String {
    match value.contains([',', ':', '"', '\n']) {
        true => serde_json::Value::String(value).to_string(),
        false => value,
    }
}

/// Formats of picture files besides PNG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PictureFormat {
    Jpeg,
    /// Lossless.
    WebP,
}

/// Converts a PNG of ours to another format, with its recipe.
///
/// # Errors
/// In words, where the file is no PNG, or its recipe is too long for a JPEG.
pub(crate) fn encode_as(format: PictureFormat, file: &[u8]) -> Result<Vec<u8>, String> {
    let picture = image::load_from_memory_with_format(file, image::ImageFormat::Png)
        .map_err(|problem| problem.to_string())?
        .into_rgb8();
    let exif = recipe_of(file).ok().map(|recipe| exif_of(&recipe)).transpose()?;
    let mut out = Vec::new();
    let written = match format {
        PictureFormat::Jpeg => {
            // The encoder writes 16 bits of any length: the file would be damaged.
            let length = exif.as_ref().map_or(0, Vec::len);
            if length > exif::JPEG_LIMIT_BYTES {
                return Err("the prompt is too long for the metadata of a JPEG: write a .png".to_owned());
            }
            let encoder = JpegEncoder::new_with_quality(&mut out, JPEG_QUALITY);
            encode_by(encoder, &picture, exif)
        }
        PictureFormat::WebP => encode_by(WebPEncoder::new_lossless(&mut out), &picture, exif),
    };
    written.map(|()| out)
}

/// Exif with a recipe, as JSON and as other tools read it.
fn exif_of(recipe: &Recipe) -> Result<Vec<u8>, String> {
    let json = serde_json::to_string(recipe).map_err(|problem| problem.to_string())?;
    Ok(exif::write(&json, &parameters(recipe)))
}

fn encode_by(
    mut encoder: impl ImageEncoder,
    picture: &image::RgbImage,
    exif: Option<Vec<u8>>,
) -> Result<(), String> {
    if let Some(exif) = exif {
        encoder
            .set_exif_metadata(exif)
            .map_err(|problem| problem.to_string())?;
    }
    picture
        .write_with_encoder(encoder)
        .map_err(|problem| problem.to_string())
}

/// Why a picture is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PictureError {
    /// Not an image, or a damaged one.
    #[error("cannot be read as PNG, JPEG or WebP: {0}")]
    Unreadable(String),
    /// Its sides or its decoded size exceed the limits.
    #[error(
        "is larger than {LONGEST_SIDE_PIXELS} pixels on a side or than {} MiB decoded",
        DECODE_LIMIT_BYTES >> 20
    )]
    TooLarge,
    /// It has no pixels.
    #[error("has no pixels")]
    Empty,
    /// A failed download or paste.
    #[error("is empty: it has 0 bytes")]
    NoBytes,
    /// A download that ended early.
    #[error("is a JPEG that is cut off: its end is missing")]
    CutOff,
}

/// The media type of an encoded picture, by its first bytes.
pub(crate) fn media_type(data: &[u8]) -> &'static str {
    image::guess_format(data).map_or("application/octet-stream", |format| format.to_mime_type())
}

/// Decodes a picture that a client sent, upright, and scales it as the references do.
pub(crate) fn decode(data: &[u8], scale_to: Option<(u32, u32)>) -> Result<Pixels, PictureError> {
    let rgb = upright(data)?.into_rgb8();
    let size = rgb.dimensions();
    let (width, height) = scale_to.unwrap_or(size);
    let rgb = match (width, height) == size {
        true => rgb.into_raw(),
        false => pipelines::resized(&rgb, 3, size, (width, height)),
    };
    Ok(Pixels { width, height, rgb })
}

/// Decodes a mask that a client sent: its grey, a byte for each pixel of this size. Colours are weighed as ITU-R 601 does. Of
/// white paint on a transparent ground it is the paint.
pub(crate) fn decode_mask(data: &[u8], size: (u32, u32)) -> Result<Vec<u8>, PictureError> {
    let picture = upright(data)?;
    let from = (picture.width(), picture.height());
    if let Some(painted) = white_paint(&picture) {
        return Ok(pipelines::resized(&painted, 1, from, size));
    }
    if picture.color().has_color() {
        let rgb = pipelines::resized(&picture.into_rgb8(), 3, from, size);
        let grey = |pixel: &[u8]| {
            let weighed = pixel.iter().zip([19_595u32, 38_470, 7_471]);
            let sum: u32 = weighed.map(|(&byte, weight)| u32::from(byte) * weight).sum();
            ((sum + (1 << 15)) >> 16) as u8
        };
        return Ok(rgb.chunks_exact(3).map(grey).collect());
    }
    Ok(pipelines::resized(&picture.into_luma8(), 1, from, size))
}

/// How opaque each pixel is, where all of them are white and some of them transparent: a mask that somebody painted on an
/// empty layer. By its colours alone it would be a mask of everything.
fn white_paint(picture: &DynamicImage) -> Option<Vec<u8>> {
    if !picture.color().has_alpha() {
        return None;
    }
    let pixels = picture.to_luma_alpha8();
    let is_white = pixels.pixels().all(|pixel| pixel[0] == u8::MAX);
    let is_painted = pixels.pixels().any(|pixel| pixel[1] < u8::MAX);
    (is_white && is_painted).then(|| pixels.pixels().map(|pixel| pixel[1]).collect())
}

/// Width and height of a picture that a client sent, upright, by its header: its pixels are not decoded.
pub(crate) fn size_of(data: &[u8]) -> Result<(u32, u32), PictureError> {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    let (decoder, orientation) = opened(data)?;
    let (width, height) = decoder.dimensions();
    match orientation {
        Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH => Ok((height, width)),
        _ => Ok((width, height)),
    }
}

/// Decodes a picture within limits, and turns it as its orientation says.
fn upright(data: &[u8]) -> Result<DynamicImage, PictureError> {
    let (decoder, orientation) = opened(data)?;
    if is_cut_jpeg(data) {
        return Err(PictureError::CutOff);
    }
    let mut picture = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
    picture.apply_orientation(orientation);
    Ok(picture)
}

/// Whether a JPEG has no end (ITU-T T.81, annex B): its decoder makes what is missing grey.
fn is_cut_jpeg(data: &[u8]) -> bool {
    const START_OF_SCAN: u8 = 0xda;
    const END: [u8; 2] = [0xff, 0xd9];
    let Some(mut rest) = data.strip_prefix(&[0xff, 0xd8]) else {
        return false;
    };
    // Segments are passed over: a thumbnail in one of them has an end of its own.
    while let &[0xff, kind, high, low, ..] = rest {
        if kind == START_OF_SCAN {
            // In coded data 0xff has a zero after it, unless it begins a marker.
            return !rest.windows(END.len()).any(|bytes| bytes == END);
        }
        rest = match kind {
            0xff => &rest[1..], // padding
            _ => rest
                .get(2 + usize::from(u16::from_be_bytes([high, low]))..)
                .unwrap_or_default(),
        };
    }
    true
}

fn unreadable(problem: image::ImageError) -> PictureError {
    match problem {
        image::ImageError::Limits(_) => PictureError::TooLarge,
        other => PictureError::Unreadable(other.to_string()),
    }
}

/// A picture within limits, by its header, and how it is to be turned.
fn opened(data: &[u8]) -> Result<(impl ImageDecoder + '_, Orientation), PictureError> {
    if data.is_empty() {
        return Err(PictureError::NoBytes);
    }
    let mut reader = ImageReader::new(Cursor::new(data))
        .with_guessed_format()
        .map_err(|problem| PictureError::Unreadable(problem.to_string()))?;
    let mut limits = Limits::default();
    limits.max_image_width = Some(LONGEST_SIDE_PIXELS);
    limits.max_image_height = Some(LONGEST_SIDE_PIXELS);
    limits.max_alloc = Some(DECODE_LIMIT_BYTES);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(unreadable)?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(PictureError::Empty);
    }
    if width > LONGEST_SIDE_PIXELS
        || height > LONGEST_SIDE_PIXELS
        || decoder.total_bytes() > DECODE_LIMIT_BYTES
    {
        return Err(PictureError::TooLarge);
    }
    let orientation = decoder.orientation().map_err(unreadable)?;
    Ok((decoder, orientation))
}

/// Encodes frames of RGB as an animated PNG that repeats for ever.
///
/// # Errors
/// A message for people, when bytes are missing or the rate is not positive.
pub(crate) fn animated_png(
    (width, height): (u32, u32),
    frames: u32,
    frames_per_second: f32,
    rgb: &[u8],
) -> Result<Vec<u8>, String> {
    let frame_bytes = 3 * width as usize * height as usize;
    if frame_bytes == 0 || rgb.len() != frame_bytes * frames as usize || frames_per_second <= 0.0 {
        let found = rgb.len();
        return Err(format!(
            "{found} bytes are not {frames} frames of {width}x{height}"
        ));
    }
    let delay_ms = (1000.0 / frames_per_second).round().clamp(1.0, 65_535.0) as u16;
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let animated = encoder.set_animated(frames, 0);
    animated.map_err(|e| e.to_string())?;
    encoder
        .set_frame_delay(delay_ms, 1000)
        .map_err(|e| e.to_string())?;
    let mut writer = encoder.write_header().map_err(|e| e.to_string())?;
    for frame in rgb.chunks_exact(frame_bytes) {
        writer.write_image_data(frame).map_err(|e| e.to_string())?;
    }
    writer.finish().map_err(|e| e.to_string())?;
    Ok(file)
}

/// Encodes a PNG with fast compression, and with a recipe in it if one is given.
pub(crate) fn png(width: u32, height: u32, rgb: &[u8], recipe: Option<&Recipe>) -> Result<Vec<u8>, String> {
    let mut file = Vec::with_capacity(rgb.len() / 2);
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    if let Some(recipe) = recipe {
        let json = serde_json::to_string(recipe).map_err(|e| e.to_string())?;
        encoder
            .add_itxt_chunk(RECIPE_KEYWORD.to_owned(), json)
            .map_err(|e| e.to_string())?;
        let parameters = parameters(recipe);
        // Some tools read the older chunk alone, which has Latin-1.
        let is_latin_1 = parameters.chars().all(|c| u32::from(c) <= 0xff);
        let added = match is_latin_1 {
            true => encoder.add_text_chunk(PARAMETERS_KEYWORD.to_owned(), parameters),
            false => encoder.add_itxt_chunk(PARAMETERS_KEYWORD.to_owned(), parameters),
        };
        added.map_err(|e| e.to_string())?;
    }
    let mut writer = encoder.write_header().map_err(|e| e.to_string())?;
    writer.write_image_data(rgb).map_err(|e| e.to_string())?;
    writer.finish().map_err(|e| e.to_string())?;
    Ok(file)
}

/// Reads the recipe from a picture, an MP4 or a track that moored saved.
pub(crate) fn recipe_of(file: &[u8]) -> Result<Recipe, String> {
    const NONE: &str = "has no moored settings; --from needs a picture, a film or a track saved by moored";
    let parse =
        |text: &str| serde_json::from_str(text).map_err(|e| format!("its settings cannot be read: {e}"));
    if films::is_mp4(file) {
        return parse(films::recipe_of(file).ok_or(NONE)?);
    }
    if tracks::is_track(file) {
        return parse(&tracks::recipe_of(file).ok_or(NONE)?);
    }
    if !matches!(image::guess_format(file), Ok(image::ImageFormat::Png)) {
        let reader = ImageReader::new(Cursor::new(file)).with_guessed_format();
        let mut decoder = reader
            .map_err(|problem| problem.to_string())?
            .into_decoder()
            .map_err(|problem| {
                format!("cannot be read: recipes are in PNG, JPEG, WebP, MP4, WAV and FLAC files ({problem})")
            })?;
        let exif = decoder.exif_metadata().ok().flatten().unwrap_or_default();
        return parse(&exif::read(&exif).ok_or(NONE)?);
    }
    let mut reader = png::Decoder::new(Cursor::new(file))
        .read_info()
        .map_err(|e| format!("it is no PNG: {e}"))?;
    let _ = reader.finish(); // text chunks may stand behind the pixels
    let mut texts = reader.info().utf8_text.iter();
    let mut chunk = texts
        .find(|chunk| chunk.keyword == RECIPE_KEYWORD)
        .ok_or(NONE)?
        .clone();
    // A few megabytes of it could become gigabytes.
    chunk
        .decompress_text_with_limit(LONGEST_RECIPE_BYTES)
        .map_err(|problem| {
            format!("has a recipe that is damaged, or longer than any of moored: {problem}")
        })?;
    parse(&chunk.get_text().map_err(|e| e.to_string())?)
}

/// A preview as JPEG, scaled down to what a preview needs.
pub(crate) fn preview_jpeg(width: u32, height: u32, rgb: Bytes) -> Result<Vec<u8>, String> {
    let rgb = Vec::from(rgb); // not copied where nobody else has it
    let buffer = image::RgbImage::from_raw(width, height, rgb).ok_or("the preview has too few pixels")?;
    let mut picture = DynamicImage::ImageRgb8(buffer);
    if width.max(height) > PREVIEW_SIDE_PIXELS {
        picture = picture.thumbnail(PREVIEW_SIDE_PIXELS, PREVIEW_SIDE_PIXELS);
    }
    let mut file = Vec::new();
    let encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut file, PREVIEW_JPEG_QUALITY);
    picture.write_with_encoder(encoder).map_err(|e| e.to_string())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe() -> Recipe {
        Recipe {
            prompt: "ein rotes Quadrat – 🟥".to_owned(),
            seed: u64::MAX,
            width: 32,
            height: 16,
            ..Default::default()
        }
    }

    #[test]
    fn a_png_gives_back_its_pixels_and_its_recipe() {
        let rgb: Vec<u8> = (0..32 * 16 * 3).map(|i| (i % 251) as u8).collect();
        let file = png(32, 16, &rgb, Some(&recipe())).unwrap();
        assert_eq!(
            decode(&file, None).unwrap(),
            Pixels {
                width: 32,
                height: 16,
                rgb
            }
        );
        assert_eq!(recipe_of(&file).unwrap(), recipe());
    }

    /// A JPEG with this orientation in its Exif.
    fn turned(orientation: u8, width: u32, height: u32) -> Vec<u8> {
        let mut exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".to_vec();
        exif.extend([orientation, 0, 0, 0, 0, 0, 0]);
        let mut file = Vec::new();
        encode_by(
            JpegEncoder::new(&mut file),
            &image::RgbImage::new(width, height),
            Some(exif),
        )
        .unwrap();
        file
    }

    #[test]
    fn the_size_of_a_picture_is_that_in_which_it_is_decoded() {
        for orientation in 1..=8 {
            let file = turned(orientation, 32, 16);
            let decoded = decode(&file, None).unwrap();
            assert_eq!(
                size_of(&file).unwrap(),
                (decoded.width, decoded.height),
                "orientation {orientation}"
            );
            assert_eq!(decoded.width == 16, orientation > 4);
        }
        let file = png(32, 16, &[7; 3 * 32 * 16], None).unwrap();
        assert_eq!(
            size_of(&file[..60]).unwrap(),
            (32, 16),
            "the pixels are not looked at"
        );
        assert!(size_of(b"no picture").is_err());
    }

    #[test]
    fn metadata_can_be_left_out() {
        let file = png(1, 1, &[1, 2, 3], None).unwrap();
        assert!(recipe_of(&file).unwrap_err().contains("no moored settings"));
    }

    #[test]
    fn the_recipe_survives_in_every_format() {
        let rgb: Vec<u8> = (0..32 * 16 * 3).map(|i| (i % 251) as u8).collect();
        let file = png(32, 16, &rgb, Some(&recipe())).unwrap();
        let webp = encode_as(PictureFormat::WebP, &file).unwrap();
        assert_eq!(decode(&webp, None).unwrap().rgb, rgb, "without loss");
        let jpeg = encode_as(PictureFormat::Jpeg, &file).unwrap();
        for (file, format) in [(webp, image::ImageFormat::WebP), (jpeg, image::ImageFormat::Jpeg)] {
            assert_eq!(image::guess_format(&file).unwrap(), format);
            assert_eq!(recipe_of(&file).unwrap(), recipe());
            let none = png(32, 16, &rgb, None).unwrap();
            let bare = encode_as(PictureFormat::Jpeg, &none).unwrap();
            assert!(recipe_of(&bare).unwrap_err().contains("no moored settings"));
        }
    }

    /// What the Python client's tests hold too: recipes, and what is made of them.
    #[derive(Deserialize)]
    struct Case {
        recipe: Recipe,
        parameters: String,
        /// In hexadecimal digits; not in every case.
        #[serde(default)]
        exif: String,
        /// The header of a WAV of 5 samples of 2 channels, 8000 a second; of tracks.
        #[serde(default)]
        wav: String,
    }

    fn cases() -> Vec<Case> {
        serde_json::from_str(include_str!("../../../client-py/tests/recipes.json")).unwrap()
    }

    fn bytes(digits: &str) -> Vec<u8> {
        let pairs = (0..digits.len()).step_by(2);
        pairs
            .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
            .collect()
    }

    /// The text of that name in a PNG: of the older chunk, which has Latin-1 alone, and of the newer one.
    fn texts_of(file: &[u8], keyword: &str) -> (Option<String>, Option<String>) {
        let reader = png::Decoder::new(Cursor::new(file)).read_info().unwrap();
        let info = reader.info();
        let mut older = info.uncompressed_latin1_text.iter();
        let mut newer = info.utf8_text.iter();
        let older = older.find(|chunk| chunk.keyword == keyword);
        let newer = newer.find(|chunk| chunk.keyword == keyword);
        (
            older.map(|chunk| chunk.text.clone()),
            newer.map(|chunk| chunk.get_text().unwrap()),
        )
    }

    #[test]
    fn other_tools_read_the_same_settings_as_in_files_of_the_python_client() {
        for case in cases() {
            assert_eq!(parameters(&case.recipe), case.parameters);
            let file = png(1, 1, &[1, 2, 3], Some(&case.recipe)).unwrap();
            let is_latin_1 = case.parameters.chars().all(|c| u32::from(c) <= 0xff);
            let expected = match is_latin_1 {
                true => (Some(case.parameters), None),
                false => (None, Some(case.parameters)),
            };
            assert_eq!(texts_of(&file, "parameters"), expected);
        }
    }

    #[test]
    fn jpeg_and_webp_have_the_same_exif_as_those_of_the_python_client() {
        let cases = cases().into_iter().filter(|case| !case.exif.is_empty());
        let mut checked = 0;
        for case in cases {
            let expected = bytes(&case.exif);
            let file = png(1, 1, &[1, 2, 3], Some(&case.recipe)).unwrap();
            for encoding in [PictureFormat::Jpeg, PictureFormat::WebP] {
                let file = encode_as(encoding, &file).unwrap();
                assert!(
                    file.windows(expected.len()).any(|found| found == expected),
                    "{encoding:?} of {:?}",
                    case.recipe
                );
                assert_eq!(recipe_of(&file).unwrap(), case.recipe);
            }
            checked += 1;
        }
        assert!(checked > 0, "the file has such cases");
    }

    #[test]
    fn a_wav_has_the_same_header_as_one_of_the_python_client() {
        let cases = cases().into_iter().filter(|case| !case.wav.is_empty());
        let mut checked = 0;
        for case in cases {
            let format = tracks::TrackFormat {
                samples_per_second: 8000,
                channels: 2,
                samples: 5,
            };
            let header = tracks::wav_header(format, Some(&case.recipe)).unwrap();
            assert_eq!(header, bytes(&case.wav));
            let file = [header, vec![0; 20]].concat();
            assert_eq!(recipe_of(&file).unwrap(), case.recipe);
            checked += 1;
        }
        assert!(checked > 0, "the file has such cases");
    }

    #[test]
    fn a_prompt_too_long_for_a_jpeg_is_refused_and_webp_has_it() {
        let long = Recipe {
            prompt: "very ".repeat(20_000),
            ..recipe()
        };
        let file = png(1, 1, &[1, 2, 3], Some(&long)).unwrap();
        assert!(
            encode_as(PictureFormat::Jpeg, &file)
                .unwrap_err()
                .contains("too long")
        );
        let webp = encode_as(PictureFormat::WebP, &file).unwrap();
        assert_eq!(recipe_of(&webp).unwrap(), long);
    }

    #[test]
    fn white_paint_on_a_transparent_ground_is_a_mask_of_the_paint() {
        let drawn = |colours: [u8; 3], ground: [u8; 4]| {
            let pixel = |x: u32, _| match x < 2 {
                true => image::Rgba([colours[0], colours[1], colours[2], 255]),
                false => image::Rgba(ground),
            };
            let mut file = Cursor::new(Vec::new());
            let drawn = image::RgbaImage::from_fn(4, 4, pixel);
            drawn.write_to(&mut file, image::ImageFormat::Png).unwrap();
            decode_mask(&file.into_inner(), (4, 4)).unwrap()[..4].to_vec()
        };
        assert_eq!(drawn([255; 3], [255, 255, 255, 0]), [255, 255, 0, 0]);
        // Any other mask goes by its colours, whatever is transparent.
        assert_eq!(drawn([255; 3], [0, 0, 0, 0]), [255, 255, 0, 0]);
        assert_eq!(drawn([0; 3], [255, 255, 255, 0]), [0, 0, 255, 255]);
        assert_eq!(drawn([255; 3], [255, 255, 255, 255]), [255; 4]);
    }

    /// A picture cut anywhere must not come with grey in place of what is missing.
    #[test]
    fn every_format_refuses_a_file_that_is_cut_off() {
        let side = 48_usize;
        let rgb: Vec<u8> = (0..3 * side * side).map(|n| (n * n / 7 % 251) as u8).collect();
        let png = png(side as u32, side as u32, &rgb, None).unwrap();
        let film = [rgb.as_slice(), &rgb].concat();
        let apng = animated_png((side as u32, side as u32), 2, 8.0, &film).unwrap();
        let mut files = vec![("APNG", apng)];
        for (name, format) in [
            ("JPEG", image::ImageFormat::Jpeg),
            ("WebP", image::ImageFormat::WebP),
            ("PNG", image::ImageFormat::Png),
        ] {
            let mut file = Cursor::new(Vec::new());
            let picture = image::load_from_memory(&png).unwrap().into_rgb8();
            picture.write_to(&mut file, format).unwrap();
            files.push((name, file.into_inner()));
        }
        files.push(("PNG of ours", png));
        for (name, file) in files {
            assert!(decode(&file, None).is_ok(), "{name}");
            // The pixels that are decoded of an animation are those of its first frame.
            let tenths = if name == "APNG" { 4 } else { 10 };
            for tenth in 0..tenths {
                let cut = &file[..file.len() * tenth / 10];
                assert!(decode(cut, None).is_err(), "{name}, {tenth} tenths");
            }
        }
    }

    #[test]
    fn unreadable_pictures_are_refused() {
        assert!(matches!(decode(b"", None), Err(PictureError::NoBytes)));
        assert!(matches!(
            decode(b"not a picture at all", None),
            Err(PictureError::Unreadable(_))
        ));
        let mut cut = png(32, 16, &[7; 32 * 16 * 3], None).unwrap();
        cut.truncate(cut.len() / 2);
        assert!(matches!(decode(&cut, None), Err(PictureError::Unreadable(_))));
    }

    #[test]
    fn a_decompression_bomb_is_refused_before_it_is_decoded() {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 40_000, 40_000);
        encoder.set_color(png::ColorType::Rgb);
        drop(encoder.write_header().unwrap());
        assert!(
            matches!(decode(&file, None), Err(PictureError::TooLarge)),
            "{:?}",
            decode(&file, None)
        );
    }

    #[test]
    fn a_preview_is_scaled_to_512_pixels() {
        let file = preview_jpeg(1024, 512, vec![9; 1024 * 512 * 3].into()).unwrap();
        let small = decode(&file, None).unwrap();
        assert_eq!((small.width, small.height), (512, 256));
    }
}
