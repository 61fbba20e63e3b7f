//! The sound of films: read back by the index of the file, and by a reader of MP4 that knows edit lists.

use bytes::Bytes;
use shiguredo_mp4::boxes::TrakBox;

use super::*;
use crate::tracks::TrackFormat;

/// As long as 29 frames of 30 a second.
const SOUND: TrackFormat = TrackFormat {
    samples_per_second: 48_000,
    channels: 2,
    samples: 46_400,
};

/// A note that begins at a third of the sound, in the left channel higher than in the right one.
fn samples(format: &TrackFormat) -> Vec<i16> {
    let begins = format.samples / 3;
    let sample = |number: u64, channel: u32| {
        let seconds = number as f64 / f64::from(format.samples_per_second);
        let note = (seconds * 440.0 * f64::from(channel + 1) * std::f64::consts::TAU).sin();
        if number < begins {
            0
        } else {
            (note * 9000.0) as i16
        }
    };
    let all = (0..format.samples).flat_map(|number| (0..format.channels).map(move |of| (number, of)));
    all.map(|(number, channel)| sample(number, channel)).collect()
}

fn bytes_of_samples(samples: &[i16]) -> Bytes {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

/// The file of a film, whose sound is added in these ranges of samples.
fn film_with(format: TrackFormat, pieces: &[std::ops::Range<u64>]) -> Vec<u8> {
    let data = bytes_of_samples(&samples(&format));
    let mut sound = FilmSound::new(format).unwrap();
    for piece in pieces {
        assert!(!sound.is_complete());
        let byte = |sample: u64| (sample * 2 * u64::from(format.channels)) as usize;
        let data = data.slice(byte(piece.start)..byte(piece.end));
        sound.add(piece.start, &data).unwrap();
    }
    assert!(sound.is_complete());
    let mut file = FilmFile::new(FORMAT).unwrap();
    file.add(0, &frames(&FORMAT, 0..29)).unwrap();
    bytes_of(&file.finish(Some(sound), Some(&recipe())).unwrap(), 1000)
}

/// The channels of a file as it is heard, 1 is full scale.
fn heard(file: &[u8]) -> Vec<Vec<f32>> {
    let options = syom::DecodeOptions::unbounded().with_channel_mode(syom::ChannelMode::Split);
    syom::decode_with(file, &options).unwrap().channels
}

/// How far a channel is from what was added, as a part of it.
fn relative_error(format: &TrackFormat, channel: usize, heard: &[f32]) -> f64 {
    let samples = samples(format);
    let asked = samples.iter().skip(channel).step_by(format.channels as usize);
    let (mut off, mut all) = (0.0, 0.0);
    for (asked, heard) in asked.zip(heard) {
        let asked = f64::from(*asked) / 32768.0;
        off += (asked - f64::from(*heard)).powi(2);
        all += asked.powi(2);
    }
    (off / all).sqrt()
}

fn track_of_sound(index: &MoovBox) -> &TrakBox {
    assert_eq!(index.trak_boxes.len(), 2);
    &index.trak_boxes[1]
}

#[test]
fn sound_is_in_its_place_and_neither_longer_nor_shorter() {
    let rates = [
        (48_000, 2, 46_400),
        (44_100, 2, 42_630),
        (16_000, 1, 15_467),
        (16_000, 2, 1),
    ];
    for (samples_per_second, channels, samples) in rates {
        let format = TrackFormat {
            samples_per_second,
            channels,
            samples,
        };
        let file = film_with(format, std::slice::from_ref(&(0..samples)));
        let heard = heard(&file);
        assert_eq!(heard.len(), channels as usize);
        for (number, channel) in heard.iter().enumerate() {
            assert_eq!(channel.len() as u64, samples, "{format:?}");
            // A shift by a single sample is an error of 0.06 at 440 Hz.
            let off = relative_error(&format, number, channel);
            assert!(
                samples == 1 || off < 0.03,
                "{format:?}: channel {number} is off by {off}"
            );
        }
        assert_eq!(decoded(&file).len(), 29, "the frames are as without sound");
    }
}

#[test]
fn the_index_says_how_long_frames_and_sound_are() {
    let file = film_with(SOUND, std::slice::from_ref(&(0..SOUND.samples)));
    let index = index_of(&file);
    let unit = u64::from(index.mvhd_box.timescale.get());
    // 29/30 of a second is 46,400 samples: both are whole in the units of the file.
    assert_eq!(index.mvhd_box.duration * 30, 29 * unit);
    let sound = track_of_sound(&index);
    assert_eq!(sound.tkhd_box.duration * 48_000, SOUND.samples * unit);
    let edits = sound.edts_box.as_ref().unwrap().elst_box.as_ref().unwrap();
    let [edit] = &edits.entries[..] else {
        panic!("{edits:?}")
    };
    assert_eq!(
        (edit.media_time, edit.edit_duration),
        (1024, sound.tkhd_box.duration)
    );
    let table = &sound.mdia_box.minf_box.stbl_box;
    let decoded: u64 = table
        .stts_box
        .entries
        .iter()
        .map(|entry| u64::from(entry.sample_count) * u64::from(entry.sample_delta))
        .sum();
    assert_eq!(decoded, 1024 + SOUND.samples);
    assert_eq!(sound.mdia_box.mdhd_box.duration, decoded);
    let packets: u32 = table
        .stts_box
        .entries
        .iter()
        .map(|entry| entry.sample_count)
        .sum();
    let shiguredo_mp4::boxes::StszBox::Variable { entry_sizes } = &table.stsz_box else {
        panic!("{:?}", table.stsz_box)
    };
    assert_eq!(packets as usize, entry_sizes.len());
    assert_eq!(crate::recipe_of(&file).unwrap(), recipe());
}

#[test]
fn a_second_of_frames_is_beside_its_sound() {
    let format = FilmFormat { frames: 70, ..FORMAT };
    let of_sound = TrackFormat {
        samples: 112_000,
        ..SOUND
    };
    let mut sound = FilmSound::new(of_sound).unwrap();
    sound.add(0, &bytes_of_samples(&samples(&of_sound))).unwrap();
    let mut film = FilmFile::new(format).unwrap();
    film.add(0, &frames(&format, 0..70)).unwrap();
    let file = bytes_of(&film.finish(Some(sound), None).unwrap(), 1000);
    let index = index_of(&file);
    let mut places: Vec<(u64, usize)> = Vec::new();
    for (number, track) in index.trak_boxes.iter().enumerate() {
        let table = SampleTableAccessor::new(&track.mdia_box.minf_box.stbl_box).unwrap();
        places.extend(table.chunks().map(|chunk| (chunk.offset(), number)));
    }
    places.sort_unstable();
    let tracks: Vec<usize> = places.iter().map(|(_, track)| *track).collect();
    assert_eq!(tracks, [0, 1, 0, 1, 0, 1]);
    assert_eq!(heard(&file)[0].len(), 112_000);
    assert_eq!(decoded(&file).len(), 70);
}

#[test]
fn pieces_of_sound_in_any_order_give_the_same_file() {
    let whole = film_with(SOUND, std::slice::from_ref(&(0..SOUND.samples)));
    for pieces in [
        &[0..1000, 1000..30_000, 30_000..46_400][..],
        &[30_000..46_400, 0..1, 1..30_000],
        // What was added before is left out.
        &[0..2000, 0..2000, 1000..46_400],
    ] {
        assert!(film_with(SOUND, pieces) == whole, "{pieces:?}");
    }
}

#[test]
fn silence_and_full_scale_are_encoded() {
    for loudness in [0, i16::MIN, i16::MAX] {
        let format = TrackFormat {
            samples: 5000,
            ..SOUND
        };
        let mut sound = FilmSound::new(format).unwrap();
        sound.add(0, &bytes_of_samples(&[loudness; 10_000])).unwrap();
        let mut file = FilmFile::new(FORMAT).unwrap();
        file.add(0, &frames(&FORMAT, 0..29)).unwrap();
        let file = bytes_of(&file.finish(Some(sound), None).unwrap(), 1000);
        let expected = f32::from(loudness) / 32768.0;
        assert!((heard(&file)[0][2500] - expected).abs() < 0.05);
    }
}

#[test]
fn what_is_not_of_the_sound_is_refused() {
    let refused = |samples_per_second, channels| {
        let format = TrackFormat {
            samples_per_second,
            channels,
            samples: 10,
        };
        FilmSound::new(format).err().unwrap().to_string()
    };
    assert!(refused(12_345, 2).contains("12345"), "{}", refused(12_345, 2));
    assert!(
        refused(48_000, 0).contains("AAC encoder"),
        "{}",
        refused(48_000, 0)
    );
    let mut sound = FilmSound::new(SOUND).unwrap();
    for (first, bytes) in [(0, 3), (46_400, 4), (u64::MAX, 4)] {
        let refused = sound.add(first, &vec![0; bytes].into()).unwrap_err();
        assert!(matches!(refused, FilmError::Sound(_)), "{refused}");
    }
    sound.add(0, &vec![0; 4].into()).unwrap();
    let mut file = FilmFile::new(FORMAT).unwrap();
    file.add(0, &frames(&FORMAT, 0..29)).unwrap();
    let missing = file.finish(Some(sound), None).unwrap_err().to_string();
    assert!(missing.contains("samples are missing"), "{missing}");
}
