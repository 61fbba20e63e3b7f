use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use serde::Deserialize;

use super::encode::encode_by;
use super::*;
use crate::recipe::{Recipe, parameters};
use crate::{CancelToken, recipe_of, tracks};

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
        decode(&file, None, &CancelToken::default()).unwrap(),
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
        let decoded = decode(&file, None, &CancelToken::default()).unwrap();
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
    assert_eq!(
        decode(&webp, None, &CancelToken::default()).unwrap().rgb,
        rgb,
        "without loss"
    );
    let jpeg = encode_as(PictureFormat::Jpeg, &file).unwrap();
    for (file, format) in [(webp, image::ImageFormat::WebP), (jpeg, image::ImageFormat::Jpeg)] {
        assert_eq!(image::guess_format(&file).unwrap(), format);
        assert_eq!(recipe_of(&file).unwrap(), recipe());
        let none = png(32, 16, &rgb, None).unwrap();
        let bare = encode_as(PictureFormat::Jpeg, &none).unwrap();
        assert!(recipe_of(&bare).unwrap_err().contains("no moored settings"));
    }
}

/// The cases that the Python client's tests share: recipes, and their texts and files.
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
    serde_json::from_str(include_str!("../../../../client-py/tests/recipes.json")).unwrap()
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
        decode_mask(&file.into_inner(), (4, 4), &CancelToken::default()).unwrap()[..4].to_vec()
    };
    assert_eq!(drawn([255; 3], [255, 255, 255, 0]), [255, 255, 0, 0]);
    // Any other mask is read by its colours, and its transparency is ignored.
    assert_eq!(drawn([255; 3], [0, 0, 0, 0]), [255, 255, 0, 0]);
    assert_eq!(drawn([0; 3], [255, 255, 255, 0]), [0, 0, 255, 255]);
    assert_eq!(drawn([255; 3], [255, 255, 255, 255]), [255; 4]);
}

/// A cut picture must be refused, not decoded with grey in place of the missing part.
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
        assert!(decode(&file, None, &CancelToken::default()).is_ok(), "{name}");
        // The pixels that are decoded of an animation are those of its first frame.
        let tenths = if name == "APNG" { 4 } else { 10 };
        for tenth in 0..tenths {
            let cut = &file[..file.len() * tenth / 10];
            assert!(
                decode(cut, None, &CancelToken::default()).is_err(),
                "{name}, {tenth} tenths"
            );
        }
    }
}

#[test]
fn unreadable_pictures_are_refused() {
    assert!(matches!(
        decode(b"", None, &CancelToken::default()),
        Err(PictureError::NoBytes)
    ));
    assert!(matches!(
        decode(b"not a picture at all", None, &CancelToken::default()),
        Err(PictureError::Unreadable(_))
    ));
    let mut cut = png(32, 16, &[7; 32 * 16 * 3], None).unwrap();
    cut.truncate(cut.len() / 2);
    assert!(matches!(
        decode(&cut, None, &CancelToken::default()),
        Err(PictureError::Unreadable(_))
    ));
}

#[test]
fn a_decompression_bomb_is_refused_before_it_is_decoded() {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 40_000, 40_000);
    encoder.set_color(png::ColorType::Rgb);
    drop(encoder.write_header().unwrap());
    assert!(
        matches!(
            decode(&file, None, &CancelToken::default()),
            Err(PictureError::TooLarge)
        ),
        "{:?}",
        decode(&file, None, &CancelToken::default())
    );
}

#[test]
fn a_preview_is_scaled_to_512_pixels() {
    let file = preview_jpeg(1024, 512, vec![9; 1024 * 512 * 3].into()).unwrap();
    let small = decode(&file, None, &CancelToken::default()).unwrap();
    assert_eq!((small.width, small.height), (512, 256));
}

/// A progressive JPEG of these sides with so many scans, none of which has anything.
fn jpeg_of_scans(side: u16, scans: usize) -> Vec<u8> {
    let mut file = vec![0xff, 0xd8];
    let [high, low] = side.to_be_bytes();
    file.extend([0xff, 0xc2, 0, 11, 8, high, low, high, low, 1, 1, 0x11, 0]);
    for _ in 0..scans {
        file.extend([0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0]);
    }
    file.extend([0xff, 0xd9]);
    file
}

#[test]
fn a_jpeg_of_too_many_scans_for_its_size_is_refused_before_it_is_decoded() {
    let outcome = |side, scans| decode(&jpeg_of_scans(side, scans), None, &CancelToken::default());
    let too_many = |side, scans| matches!(outcome(side, scans), Err(PictureError::TooManyScans));
    assert!(too_many(8192, 17) && too_many(4096, 65));
    // These are refused for what they lack, after that.
    assert!(!too_many(4096, 64) && !too_many(64, 200));
}

#[test]
fn decoding_ends_when_the_client_has_gone() {
    let file = png(2, 2, &[0; 12], None).unwrap();
    let (cancelled, _) = CancelToken::new();
    assert!(matches!(
        decode(&file, None, &cancelled),
        Err(PictureError::Cancelled)
    ));
    assert!(matches!(
        decode_mask(&file, (2, 2), &cancelled),
        Err(PictureError::Cancelled)
    ));
}
