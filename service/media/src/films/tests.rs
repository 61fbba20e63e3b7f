use openh264::decoder::Decoder;
use openh264::formats::YUVSource as _;
use shiguredo_mp4::aux::SampleTableAccessor;
use shiguredo_mp4::boxes::{MoovBox, RootBox, SampleEntry, StblBox};
use shiguredo_mp4::{Decode as _, Mp4File};

use super::*;
use crate::FilePosition;
use crate::edits::Changes;

mod sound;

const FORMAT: FilmFormat = FilmFormat {
    width: 96,
    height: 48,
    frames: 29,
    frames_per_second: 30.0,
};

/// Frame `number`: a red square that moves to the right over a grey slope, by whole samples of chroma.
fn frame(format: &FilmFormat, number: u32) -> Vec<u8> {
    let (width, height) = (format.width, format.height);
    let mut rgb = Vec::new();
    for y in 0..height {
        for x in 0..width {
            let in_square = (2 * number..2 * number + 16).contains(&x) && (16..32).contains(&y);
            rgb.extend(match in_square {
                true => [220, 30, 40],
                false => [(40 + x + y) as u8; 3],
            });
        }
    }
    rgb
}

fn frames(format: &FilmFormat, numbers: std::ops::Range<u32>) -> Vec<u8> {
    numbers.flat_map(|number| frame(format, number)).collect()
}

fn recipe() -> Recipe {
    Recipe {
        prompt: "ein Würfel – 🟥 \"rollt\"\n".to_owned(),
        seed: u64::MAX,
        frames: Some(29),
        frames_per_second: Some(30.0),
        version: "9.9".to_owned(),
        ..Default::default()
    }
}

/// The file of a film that is added in these ranges of frames.
fn film(format: FilmFormat, pieces: &[std::ops::Range<u32>], recipe: Option<&Recipe>) -> Vec<u8> {
    let mut file = FilmFile::new(format).unwrap();
    for piece in pieces {
        assert!(!file.is_complete());
        let data = frames(&format, piece.clone());
        file.add(u64::from(piece.start), &data).unwrap();
    }
    bytes_of(&file.finish(None, recipe).unwrap(), 1000)
}

/// The file, read in chunks of this many bytes.
fn bytes_of(film: &EncodedFile, most: usize) -> Vec<u8> {
    let mut at = FilePosition::default();
    let mut file = Vec::new();
    while let Some(chunk) = film.read(&mut at, most) {
        assert!(chunk.len() == most || file.len() + chunk.len() == film.bytes() as usize);
        file.extend_from_slice(&chunk);
    }
    assert_eq!(file.len() as u64, film.bytes());
    file
}

fn index_of(file: &[u8]) -> MoovBox {
    let (parsed, _) = Mp4File::<RootBox>::decode(file).unwrap();
    assert!(
        matches!(parsed.boxes[0], RootBox::Moov(_)),
        "the index is in front"
    );
    assert!(matches!(parsed.boxes[1], RootBox::Mdat(_)));
    let RootBox::Moov(index) = parsed.boxes[0].clone() else {
        unreachable!()
    };
    index
}

fn table_of(index: &MoovBox) -> StblBox {
    index.trak_boxes[0].mdia_box.minf_box.stbl_box.clone()
}

/// The decoded frames, RGB each, by a decoder that gets its samples by the file's index.
fn decoded(file: &[u8]) -> Vec<Vec<u8>> {
    let table = table_of(&index_of(file));
    let [SampleEntry::Avc1(entry)] = &table.stsd_box.entries[..] else {
        panic!("not H.264")
    };
    let mut decoder = Decoder::new().unwrap();
    let start = [0, 0, 0, 1];
    let sets = &entry.avcc_box;
    let mut units: Vec<u8> = [&start[..], &sets.sps_list[0], &start, &sets.pps_list[0]].concat();
    let mut shown = Vec::new();
    for sample in SampleTableAccessor::new(&table).unwrap().samples() {
        let place = sample.data_offset() as usize;
        let mut data = &file[place..place + sample.data_size() as usize];
        while let Some((length, rest)) = data.split_first_chunk::<4>() {
            let (unit, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
            units.extend(start);
            units.extend(unit);
            data = rest;
        }
        let picture = decoder.decode(&units).unwrap().expect("a frame for each sample");
        let (width, height) = picture.dimensions();
        let (of_luma, of_blue, of_red) = picture.strides();
        let mut rgb = Vec::new();
        for y in 0..height {
            for x in 0..width {
                let luma = (f64::from(picture.y()[y * of_luma + x]) - 16.0) / 219.0;
                let blue = (f64::from(picture.u()[y / 2 * of_blue + x / 2]) - 128.0) / 224.0;
                let red = (f64::from(picture.v()[y / 2 * of_red + x / 2]) - 128.0) / 224.0;
                // The inverse of ITU-R BT.709-6, 3.2 and 3.3.
                let (r, b) = (luma + 1.5748 * red, luma + 1.8556 * blue);
                let g = (luma - 0.2126 * r - 0.0722 * b) / 0.7152;
                rgb.extend([r, g, b].map(|value| (255.0 * value).round().clamp(0.0, 255.0) as u8));
            }
        }
        shown.push(rgb);
        units.clear();
    }
    shown
}

/// Root of the mean squared difference.
fn difference(a: &[u8], b: &[u8]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum();
    (squares / a.len() as f64).sqrt()
}

/// Levels of 0 and 255, in an order that no encoder foresees.
fn noise(format: &FilmFormat, number: u32) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32 + number;
    let mut bit = || {
        // Xorshift (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        255 * (state >> 31) as u8
    };
    (0..3 * format.width * format.height).map(|_| bit()).collect()
}

#[test]
fn frames_of_noise_are_encoded_more_coarsely_until_the_next_key_frame() {
    let format = FilmFormat { frames: 66, ..FORMAT };
    let mut file = FilmFile::new(format).unwrap();
    let calm = |number: u32| number != 0 && number != 3;
    let sent: Vec<Vec<u8>> = (0..format.frames)
        .map(|number| match calm(number) {
            true => frame(&format, number % 30),
            false => noise(&format, number),
        })
        .collect();
    for (number, rgb) in (0..).zip(&sent) {
        file.add(number, rgb).unwrap();
    }
    let file = bytes_of(&file.finish(None, None).unwrap(), 1000);
    let shown = decoded(&file);
    assert_eq!(shown.len(), 66);
    let error = |number: usize| {
        let pairs = shown[number].iter().zip(&sent[number]);
        pairs.map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / sent[number].len() as f64
    };
    assert!(
        (0..66)
            .filter(|number| calm(*number))
            .all(|number| error(number as usize) < 12.0)
    );
    // The quantizer of the others is back.
    assert!(error(65) < 2.0, "{}", error(65));
    assert!(error(3) > 4.0, "the noise was not coarser: {}", error(3));
}

#[test]
fn every_frame_is_decoded_in_its_place_size_and_colours() {
    let file = film(FORMAT, &[0..29], None);
    let shown = decoded(&file);
    assert_eq!(shown.len(), 29, "29 frames are 29 frames");
    for (number, shown) in (0..).zip(&shown) {
        let asked = frame(&FORMAT, number);
        // Chroma has half the sides: a red edge is not sharp. A frame of another place is far beyond this.
        let off = difference(&asked, shown);
        assert!(off < 6.0, "frame {number} is off by {off}");
        let middle = 3 * (24 * 96 + 2 * number as usize + 8);
        for (asked, shown) in asked[middle..middle + 3].iter().zip(&shown[middle..]) {
            assert!(
                asked.abs_diff(*shown) <= 6,
                "frame {number}: {asked} became {shown}"
            );
        }
    }
}

#[test]
fn a_film_is_the_same_from_pieces_in_any_order() {
    let orders: [&[std::ops::Range<u32>]; 4] = [
        &[20..29, 11..20, 0..11],
        &[5..9, 28..29, 0..1, 9..28, 1..5],
        &[0..10, 10..29],
        &[15..16, 14..15, 16..29, 0..14],
    ];
    for pieces in orders {
        let file = film(FORMAT, pieces, None);
        let shown = decoded(&file);
        assert_eq!(shown.len(), 29);
        for (number, shown) in (0..).zip(&shown) {
            let off = difference(&frame(&FORMAT, number), shown);
            assert!(off < 6.0, "{pieces:?}: frame {number} is off by {off}");
        }
    }
}

#[test]
fn pieces_that_follow_each_other_are_one_group_of_pictures() {
    let keys = |pieces: &[std::ops::Range<u32>]| {
        let table = table_of(&index_of(&film(FORMAT, pieces, None)));
        let keys = table.stss_box.unwrap().sample_numbers;
        keys.iter().map(|number| number.get()).collect::<Vec<_>>()
    };
    assert_eq!(keys(&[0..10, 10..29]), [1]);
    assert_eq!(keys(&[20..29, 0..20]), [1, 21]);
    let film = FilmFormat {
        frames: 61,
        frames_per_second: 10.0,
        ..FORMAT
    };
    let mut file = FilmFile::new(film).unwrap();
    file.add(0, &frames(&film, 0..61)).unwrap();
    let keys = file.samples.values().filter(|sample| sample.is_key).count();
    assert_eq!(keys, 4, "every two seconds");
}

#[test]
fn length_and_rate_are_exact() {
    for (rate, duration) in [
        (30.0_f32, (30_000, 1000)),
        (23.976, (23_976, 1000)),
        (24_000.0 / 1001.0, (24_000, 1001)),
        (12.5, (12_500, 1000)),
        (1.0 / 3.0, (33_333, 100_000)),
        (240.0, (240_000, 1000)),
    ] {
        let format = FilmFormat {
            frames: 3,
            frames_per_second: rate,
            ..FORMAT
        };
        let index = index_of(&film(format, &[0..3], None));
        let media = &index.trak_boxes[0].mdia_box;
        let steps = &media.minf_box.stbl_box.stts_box.entries;
        assert_eq!((steps.len(), steps[0].sample_count), (1, 3));
        assert_eq!(
            (media.mdhd_box.timescale.get(), steps[0].sample_delta),
            duration,
            "{rate}"
        );
        assert_eq!(media.mdhd_box.duration, 3 * u64::from(duration.1));
        assert_eq!(index.mvhd_box.duration, index.trak_boxes[0].tkhd_box.duration);
    }
}

#[test]
fn the_recipe_is_in_the_metadata_unless_it_is_left_out() {
    let file = film(FORMAT, &[0..29], Some(&recipe()));
    assert!(is_mp4(&file));
    assert_eq!(crate::recipe_of(&file).unwrap(), recipe());
    let bare = film(FORMAT, &[0..29], None);
    assert_eq!(recipe_of(&bare), None);
    let refused = crate::recipe_of(&bare).unwrap_err();
    assert!(refused.contains("no moored settings"), "{refused}");
    for cut in 0..file.len().min(2000) {
        let _ = recipe_of(&file[..cut]); // does not panic
    }
}

#[test]
fn sizes_and_rates_that_a_file_cannot_have_are_refused() {
    let sized = |width, height| FilmFormat {
        width,
        height,
        ..FORMAT
    };
    for (width, height) in [
        (65, 48),
        (64, 47),
        (0, 48),
        (64, 14),
        (3842, 64),
        (3840, 2176),
        (2176, 2176),
    ] {
        let refused = FilmFile::new(sized(width, height)).err();
        assert_eq!(refused, Some(FilmError::Size { width, height }));
    }
    for rate in [0.0, -1.0, f32::NAN, f32::INFINITY, 1000.0] {
        let format = FilmFormat {
            frames_per_second: rate,
            ..FORMAT
        };
        assert!(matches!(format.check(), Err(FilmError::Rate(_))), "{rate}");
    }
    for (width, height) in [(16, 16), (18, 30), (3840, 2160), (2160, 3840)] {
        assert_eq!(sized(width, height).check(), Ok(()));
    }
    // Sides that are no multiple of a macroblock are cut by the decoder.
    let format = FilmFormat {
        frames: 2,
        ..sized(50, 34)
    };
    let shown = decoded(&film(format, &[0..2], None));
    assert_eq!(shown[1].len(), 3 * 50 * 34);
    assert!(difference(&frame(&format, 1), &shown[1]) < 6.0);
}

#[test]
fn bytes_that_are_no_frames_of_the_film_are_refused() {
    let mut file = FilmFile::new(FORMAT).unwrap();
    let two = frames(&FORMAT, 0..2);
    for (first, rgb) in [
        (0, &two[1..]),
        (28, &two[..]),
        (29, &two[..]),
        (u64::MAX, &two[..]),
    ] {
        assert!(
            matches!(file.add(first, rgb), Err(FilmError::NotFrames { .. })),
            "{first}"
        );
    }
    file.add(0, &two).unwrap();
    assert_eq!(file.add(0, &two), Ok(0), "what is there is left out");
    assert!(file.add(1, &two).unwrap() > 0);
    let missing = file.finish(None, None).unwrap_err().to_string();
    assert!(missing.contains("26 frames are missing"), "{missing}");
}

/// For any bytes of a film, its recipe is a text in it, or is not found.
#[test]
fn any_metadata_of_a_film_is_read_safely() {
    let one_frame = FilmFormat { frames: 1, ..FORMAT };
    let file = film(one_frame, std::slice::from_ref(&(0..1)), Some(&recipe()));
    let start = file.len() - file.len().min(1500);
    // Metadata alone, so short that changes meet its lengths.
    let in_box = |content: Vec<u8>, kind: &[u8; 4]| {
        let length = 8 + content.len() as u32;
        [&length.to_be_bytes()[..], kind, &content].concat()
    };
    let item = in_box(in_box([0; 16].to_vec(), b"data"), b"\xa9cmt");
    let list = [[0; 4].to_vec(), in_box(item, b"ilst")].concat();
    let metadata = in_box(in_box(in_box(list, b"meta"), b"udta"), b"moov");
    assert!(recipe_of(&metadata).is_some());
    // The index, with little of the frame after it.
    let index = file[..file.len().min(1500)].to_vec();
    let files = [index, file[start..].to_vec(), metadata];
    bolero::check!()
        .with_iterations(5000)
        .with_max_len(Changes::MAX_LEN)
        .with_type::<Changes>()
        .for_each(|changes| {
            let file = changes.of(&files);
            if let Some(text) = recipe_of(&file) {
                assert!(text.len() <= file.len());
            }
        });
}
