//! Pictures of clients as pixels, within limits.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageReader, Limits};

use crate::{CancelToken, Cancelled};

/// Longest side of a picture that a client may send.
pub(super) const LONGEST_SIDE_PIXELS: u32 = 8192;
/// Bytes that decoding a picture may take, against decompression bombs.
const DECODE_LIMIT_BYTES: u64 = 256 << 20;

/// Pixels that the scans of a JPEG may go over together: sixteen scans of the largest picture. Progressive files have a dozen.
const DECODE_LIMIT_SAMPLES: u64 = 1 << 30;
/// Marker of a JPEG.
const START_OF_SCAN: u8 = 0xda;

/// A picture as pixels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    pub width: u32,
    pub height: u32,
    /// RGB, 8 bits each, row-major.
    pub rgb: Vec<u8>,
}

/// Why a picture is refused.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// Not an image, or a damaged one.
    #[error("cannot be read as PNG, JPEG or WebP: {0}")]
    Unreadable(String),
    /// Its sides or its decoded size exceed the limits.
    #[error(
        "is larger than {LONGEST_SIDE_PIXELS} pixels on a side or than {} MiB decoded",
        DECODE_LIMIT_BYTES >> 20
    )]
    TooLarge,
    /// A progressive JPEG of so many scans that few bytes would take long.
    #[error("is a progressive JPEG of too many scans for its size: save it as another JPEG, or as a PNG")]
    TooManyScans,
    /// It has no pixels.
    #[error("has no pixels")]
    Empty,
    /// A failed download or paste.
    #[error("is empty: it has 0 bytes")]
    NoBytes,
    /// A download that ended early.
    #[error("is a JPEG that is cut off: its end is missing")]
    CutOff,
    /// Its caller no longer waits for it.
    #[error("is no longer asked for: its client has gone")]
    Cancelled,
}

impl From<Cancelled> for PictureError {
    fn from(Cancelled: Cancelled) -> PictureError {
        PictureError::Cancelled
    }
}

/// The media type of an encoded picture, by its first bytes.
pub fn media_type(data: &[u8]) -> &'static str {
    image::guess_format(data).map_or("application/octet-stream", |format| format.to_mime_type())
}

/// Decodes a picture that a client sent, upright, and scales it as the references do. Few bytes may be many pixels: what is cancelled is
/// not decoded, and scaling ends in the row in which it is cancelled.
///
/// # Errors
/// [`PictureError`].
pub fn decode(
    data: &[u8],
    scale_to: Option<(u32, u32)>,
    cancel: &CancelToken,
) -> Result<Pixels, PictureError> {
    let rgb = upright(data, cancel)?.into_rgb8();
    let size = rgb.dimensions();
    let (width, height) = scale_to.unwrap_or(size);
    let rgb = match (width, height) == size {
        true => rgb.into_raw(),
        false => scaled(&rgb, 3, size, (width, height), cancel)?,
    };
    Ok(Pixels { width, height, rgb })
}

/// Decodes a mask that a client sent: its grey, a byte for each pixel of this size. Colours are weighed as ITU-R 601 does. For
/// white paint on a transparent ground, the paint is the mask.
///
/// # Errors
/// As [`decode`].
pub fn decode_mask(data: &[u8], size: (u32, u32), cancel: &CancelToken) -> Result<Vec<u8>, PictureError> {
    let picture = upright(data, cancel)?;
    let from = (picture.width(), picture.height());
    if let Some(painted) = white_paint(&picture) {
        return scaled(&painted, 1, from, size, cancel);
    }
    if picture.color().has_color() {
        let rgb = scaled(&picture.into_rgb8(), 3, from, size, cancel)?;
        let grey = |pixel: &[u8]| {
            let weighed = pixel.iter().zip([19_595u32, 38_470, 7_471]);
            let sum: u32 = weighed.map(|(&byte, weight)| u32::from(byte) * weight).sum();
            ((sum + (1 << 15)) >> 16) as u8
        };
        return Ok(rgb.chunks_exact(3).map(grey).collect());
    }
    scaled(&picture.into_luma8(), 1, from, size, cancel)
}

fn scaled(
    bytes: &[u8],
    channels: usize,
    from: (u32, u32),
    to: (u32, u32),
    cancel: &CancelToken,
) -> Result<Vec<u8>, PictureError> {
    let check = || cancel.check();
    Ok(model::resized_while(
        check,
        model::Filter::Lanczos,
        bytes,
        channels,
        from,
        to,
    )?)
}

/// The opacity of each pixel, if all pixels are white and some are transparent: such a mask was painted on an
/// empty layer. By its colours alone it would be a mask of the whole picture.
fn white_paint(picture: &DynamicImage) -> Option<Vec<u8>> {
    if !picture.color().has_alpha() {
        return None;
    }
    let pixels = picture.to_luma_alpha8();
    let is_white = pixels.pixels().all(|pixel| pixel[0] == u8::MAX);
    let is_painted = pixels.pixels().any(|pixel| pixel[1] < u8::MAX);
    (is_white && is_painted).then(|| pixels.pixels().map(|pixel| pixel[1]).collect())
}

/// A mask whose transparent pixels are to be changed (OpenAI's) as one whose white pixels are: a grey PNG. A mask without transparency is
/// taken to be white there already, and is returned as it is.
///
/// # Errors
/// In words, where the file is no picture.
pub fn mask_of_transparency(data: &[u8]) -> Result<Vec<u8>, String> {
    let words = |problem: &dyn std::fmt::Display| problem.to_string();
    let picture = upright(data, &CancelToken::default()).map_err(|problem| words(&problem))?;
    if !picture.color().has_alpha() {
        return Ok(data.to_vec());
    }
    let (width, height) = (picture.width(), picture.height());
    let changed = picture
        .to_luma_alpha8()
        .pixels()
        .map(|pixel| u8::MAX - pixel[1])
        .collect();
    grey_png((width, height), changed)
}

/// A mask whose black pixels are to be changed as one whose white pixels are: a grey PNG.
///
/// # Errors
/// In words, where the file is no picture.
pub fn inverted_mask(data: &[u8]) -> Result<Vec<u8>, String> {
    let cancel = CancelToken::default();
    let size = size_of(data).map_err(|problem| problem.to_string())?;
    let grey = decode_mask(data, size, &cancel).map_err(|problem| problem.to_string())?;
    grey_png(size, grey.into_iter().map(|pixel| u8::MAX - pixel).collect())
}

fn grey_png((width, height): (u32, u32), pixels: Vec<u8>) -> Result<Vec<u8>, String> {
    let mask = image::GrayImage::from_raw(width, height, pixels).ok_or("the mask has no pixels")?;
    let mut out = std::io::Cursor::new(Vec::new());
    mask.write_to(&mut out, image::ImageFormat::Png)
        .map_err(|problem| problem.to_string())?;
    Ok(out.into_inner())
}

/// Width and height of a picture that a client sent, upright, by its header: its pixels are not decoded.
pub fn size_of(data: &[u8]) -> Result<(u32, u32), PictureError> {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    let (decoder, orientation) = opened(data)?;
    let (width, height) = decoder.dimensions();
    match orientation {
        Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH => Ok((height, width)),
        _ => Ok((width, height)),
    }
}

/// Decodes a picture within limits, and turns it as its orientation says.
fn upright(data: &[u8], cancel: &CancelToken) -> Result<DynamicImage, PictureError> {
    cancel.check()?;
    let (decoder, orientation) = opened(data)?;
    if is_cut_jpeg(data) {
        return Err(PictureError::CutOff);
    }
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) * scans_of_jpeg(data) > DECODE_LIMIT_SAMPLES {
        return Err(PictureError::TooManyScans);
    }
    let mut picture = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
    cancel.check()?;
    picture.apply_orientation(orientation);
    Ok(picture)
}

/// How many scans a JPEG has (ITU-T T.81, annex B): each goes over all of its pixels. 1 for other formats.
pub(super) fn scans_of_jpeg(data: &[u8]) -> u64 {
    let is_jpeg = data.starts_with(&[0xff, 0xd8]);
    // In coded data 0xff has a zero after it or begins a marker. Two bytes of a thumbnail in a segment may look like a scan; a
    // camera's has a few.
    let scans = data
        .windows(2)
        .filter(|bytes| *bytes == [0xff, START_OF_SCAN])
        .count();
    if is_jpeg { scans.max(1) as u64 } else { 1 }
}

/// Whether a JPEG has no end (ITU-T T.81, annex B): a decoder would fill the missing part with grey.
pub(super) fn is_cut_jpeg(data: &[u8]) -> bool {
    const END: [u8; 2] = [0xff, 0xd9];
    let Some(mut rest) = data.strip_prefix(&[0xff, 0xd8]) else {
        return false;
    };
    // Segments are skipped, as a thumbnail in one of them has an end marker of its own.
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

/// Opens a picture within limits, by its header, and returns its orientation.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn png(picture: &DynamicImage) -> Vec<u8> {
        let mut out = std::io::Cursor::new(Vec::new());
        picture.write_to(&mut out, image::ImageFormat::Png).unwrap();
        out.into_inner()
    }

    #[test]
    fn a_mask_is_white_where_it_was_transparent() {
        let mut painted = image::RgbaImage::from_pixel(3, 1, image::Rgba([9, 9, 9, 255]));
        painted.put_pixel(1, 0, image::Rgba([9, 9, 9, 0]));
        painted.put_pixel(2, 0, image::Rgba([9, 9, 9, 155]));
        let made = mask_of_transparency(&png(&painted.into())).unwrap();
        assert_eq!(
            decode_mask(&made, (3, 1), &CancelToken::default()).unwrap(),
            [0, 255, 100]
        );
    }

    #[test]
    fn a_mask_without_transparency_stays_as_it_is() {
        let white = png(&image::GrayImage::from_pixel(2, 2, image::Luma([255])).into());
        assert_eq!(mask_of_transparency(&white).unwrap(), white);
        assert!(mask_of_transparency(b"no picture").is_err());
    }
}
