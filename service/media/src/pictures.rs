//! Encoding and decoding of pictures: PNG with their recipe, pictures of clients within limits, previews as JPEG.

mod decode;
mod encode;
mod exif;
mod recipe_text;

pub use decode::{
    PictureError, Pixels, decode, decode_mask, inverted_mask, mask_of_transparency, media_type, size_of,
};
pub use encode::{PictureFormat, animated_png, encode_as, png, preview_jpeg};
pub(crate) use recipe_text::recipe_text;

#[cfg(test)]
mod any_bytes;
#[cfg(test)]
mod tests;
