//! Pictures as files: PNG with their recipe, JPEG, WebP, animations, and previews.

use bytes::Bytes;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::{DynamicImage, ImageEncoder};

use super::exif;
use super::recipe_text;
use crate::recipe::{Recipe, parameters};

/// Longest side of a preview.
const PREVIEW_SIDE_PIXELS: u32 = 512;
const PREVIEW_JPEG_QUALITY: u8 = 80;
/// Name of the PNG text chunk that holds [`Recipe`] as JSON.
pub(super) const RECIPE_KEYWORD: &str = "moored";
/// Name of the chunk that holds the recipe in the form of other tools.
const PARAMETERS_KEYWORD: &str = "parameters";
/// JPEG quality of pictures, of 100.
const JPEG_QUALITY: u8 = 95;

/// Formats of picture files besides PNG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureFormat {
    Jpeg,
    /// Lossless.
    WebP,
}

/// Converts a PNG of ours to another format, with its recipe.
///
/// # Errors
/// In words, where the file is no PNG, or its recipe is too long for a JPEG.
pub fn encode_as(format: PictureFormat, file: &[u8]) -> Result<Vec<u8>, String> {
    let picture = image::load_from_memory_with_format(file, image::ImageFormat::Png)
        .map_err(|problem| problem.to_string())?
        .into_rgb8();
    let text = recipe_text(file).ok().flatten();
    let recipe = text.and_then(|text| serde_json::from_str(&text).ok());
    let exif = recipe.map(|recipe| exif_of(&recipe)).transpose()?;
    let mut out = Vec::new();
    let written = match format {
        PictureFormat::Jpeg => {
            // The encoder would cut a longer length to 16 bits, and the file would be damaged.
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

pub(super) fn encode_by(
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

/// Encodes frames of RGB as an animated PNG that repeats for ever.
///
/// # Errors
/// A message for people, when bytes are missing or the rate is not positive.
pub fn animated_png(
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

/// Encodes a PNG with fast compression, and with the recipe in it, if there is one.
pub fn png(width: u32, height: u32, rgb: &[u8], recipe: Option<&Recipe>) -> Result<Vec<u8>, String> {
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
        // Some tools read only the older chunk, which is in Latin-1.
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

/// A preview as JPEG, scaled down to the size of previews.
pub fn preview_jpeg(width: u32, height: u32, rgb: Bytes) -> Result<Vec<u8>, String> {
    let rgb = Vec::from(rgb); // not copied if this is the only reference
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
