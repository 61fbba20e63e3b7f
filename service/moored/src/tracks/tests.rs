use bytes::Bytes;
use hound::{SampleFormat, WavSpec, WavWriter};

use super::*;
use crate::encoded::EncodedFile;

const STEREO: TrackFormat = TrackFormat {
    samples_per_second: 48_000,
    channels: 2,
    samples: 10_000,
};

/// Samples of a sweep in one channel and of noise in the other.
fn sound(format: TrackFormat) -> Vec<i16> {
    let mut state = 1_u32;
    let count = format.samples as usize * format.channels as usize;
    let sample = |number: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let time = number as f32 / 1000.0;
        match number % 2 {
            0 => (20_000.0 * (time * time).sin()) as i16,
            _ => (state >> 18) as i16,
        }
    };
    (0..count).map(sample).collect()
}

fn bytes_of(samples: &[i16]) -> Bytes {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

fn whole(file: &EncodedFile) -> Bytes {
    file.read(&mut Default::default(), file.bytes() as usize).unwrap()
}

fn flac(format: TrackFormat, samples: &[i16], recipe: Option<&Recipe>) -> Bytes {
    let mut file = TrackFile::new(format, recipe).unwrap();
    file.add(0, &bytes_of(samples)).unwrap();
    whole(&file.finish().unwrap())
}

fn recipe() -> Recipe {
    Recipe {
        prompt: "ein tiefer Ton – 🎵".to_owned(),
        seed: u64::MAX,
        lyrics: "la\nla".to_owned(),
        ..Recipe::default()
    }
}

/// Reads a file with all the room that it asks for, which must be what it holds then.
fn read(file: &Bytes) -> Result<Clip, TrackError> {
    let mut asked = 0;
    let room = |bytes| {
        asked += bytes;
        Ok::<(), TrackError>(())
    };
    let clip = match media_type(file) {
        Some("audio/flac") => read_flac(file, &Caller::staying(), room),
        _ => read_wav(file, &Caller::staying(), room),
    }?;
    assert!(asked == 0 || asked == clip.data.len() as u64);
    Ok(clip)
}

fn wav(spec: WavSpec, write: impl FnOnce(&mut WavWriter<std::io::Cursor<&mut Vec<u8>>>)) -> Bytes {
    let mut file = Vec::new();
    let mut writer = WavWriter::new(std::io::Cursor::new(&mut file), spec).unwrap();
    write(&mut writer);
    writer.finalize().unwrap();
    file.into()
}

fn spec(bits: u16, format: SampleFormat) -> WavSpec {
    WavSpec {
        channels: 1,
        sample_rate: 8000,
        bits_per_sample: bits,
        sample_format: format,
    }
}

#[test]
fn a_flac_of_pieces_in_any_order_is_the_same_file_with_every_sample() {
    let samples = sound(STEREO);
    let expected = flac(STEREO, &samples, Some(&recipe()));
    let piece = |from: usize, to: usize| (from as u64, bytes_of(&samples[2 * from..2 * to]));
    for pieces in [
        [piece(0, 1), piece(1, 5000), piece(5000, 10_000)],
        [piece(5000, 10_000), piece(1, 5000), piece(0, 1)],
        // Some of them twice, as two streams bring them.
        [piece(0, 5000), piece(0, 5000), piece(3000, 10_000)],
    ] {
        let mut file = TrackFile::new(STEREO, Some(&recipe())).unwrap();
        for (first, piece) in pieces {
            assert!(!file.is_complete());
            file.add(first, &piece).unwrap();
        }
        assert!(file.is_complete());
        assert_eq!(whole(&file.finish().unwrap()), expected);
    }
    assert!(expected.len() < 2 * samples.len(), "it is compressed");
    let clip = read(&expected).unwrap();
    assert_eq!(TrackFormat::of(&clip.format), Some(STEREO));
    assert_eq!(clip.data, bytes_of(&samples));
    // The checksum in its front is that of the samples.
    let verified = flac_codec::decode::verify_reader(&expected[..]).unwrap();
    assert!(matches!(verified, flac_codec::decode::Verified::MD5Match));
}

#[test]
fn a_track_file_holds_encoded_frames_and_waiting_samples() {
    let samples = sound(STEREO);
    let mut file = TrackFile::new(STEREO, None).unwrap();
    let front = file.bytes();
    file.add(9000, &bytes_of(&samples[18_000..])).unwrap();
    assert_eq!(file.bytes(), front + 4000);
    file.add(0, &bytes_of(&samples[..18_000])).unwrap();
    assert!(file.bytes() < 36_000);
    assert!(
        file.add(9999, &bytes_of(&samples[..4])).is_err(),
        "behind the end"
    );
    assert!(
        file.add(0, &Bytes::from_static(b"abc")).is_err(),
        "a part of a sample"
    );
    let unfinished = TrackFile::new(STEREO, None).unwrap();
    assert!(unfinished.finish().is_err(), "samples are missing");
}

#[test]
fn the_recipe_is_in_both_kinds_of_files_and_can_be_left_out() {
    let samples = sound(STEREO);
    let wav = |recipe: Option<&Recipe>| {
        Bytes::from([wav_header(STEREO, recipe).unwrap(), bytes_of(&samples).to_vec()].concat())
    };
    let json = serde_json::to_string(&recipe()).unwrap();
    for file in [flac(STEREO, &samples, Some(&recipe())), wav(Some(&recipe()))] {
        assert_eq!(recipe_of(&file).as_ref(), Some(&json));
        assert_eq!(crate::pictures::recipe_of(&file).unwrap(), recipe());
        assert_eq!(read(&file).unwrap().data, bytes_of(&samples));
        // Cut anywhere, it is not read as something else.
        for cut in 0..600 {
            let found = recipe_of(&file[..cut]);
            assert!(found.is_none() || found.as_ref() == Some(&json));
        }
    }
    for file in [flac(STEREO, &samples, None), wav(None)] {
        assert_eq!(recipe_of(&file), None);
        let told = crate::pictures::recipe_of(&file).unwrap_err();
        assert!(told.contains("no moored settings"), "{told}");
    }
    assert_eq!(wav(None).len(), 44 + 2 * samples.len());
}

#[test]
fn wav_samples_of_8_to_32_bits_and_floats_are_read() {
    let read = |file: Bytes| -> Vec<i16> {
        let clip = read(&file).unwrap();
        let pairs = clip.data.as_chunks::<2>().0;
        pairs.iter().map(|&pair| i16::from_le_bytes(pair)).collect()
    };
    let whole = |bits: u16, samples: &[i32]| {
        wav(spec(bits, SampleFormat::Int), |writer| {
            for &sample in samples {
                writer.write_sample(sample).unwrap();
            }
        })
    };
    assert_eq!(read(whole(8, &[-128, 0, 127])), [-32_768, 0, 32_512]);
    assert_eq!(read(whole(16, &[-32_768, 5, 32_767])), [-32_768, 5, 32_767]);
    let bits_24 = [-8_388_608, 127, 128, -129, 8_388_607];
    assert_eq!(read(whole(24, &bits_24)), [-32_768, 0, 1, -1, 32_767]);
    assert_eq!(
        read(whole(32, &[i32::MIN, 32_768, i32::MAX])),
        [-32_768, 1, 32_767]
    );
    let with_point = wav(spec(32, SampleFormat::Float), |writer| {
        for sample in [-1.0_f32, -7.0, 0.5, 1.0 / 32_768.0, 1.0, 7.0] {
            writer.write_sample(sample).unwrap();
        }
    });
    assert_eq!(read(with_point), [-32_768, -32_768, 16_384, 1, 32_767, 32_767]);
}

#[test]
fn samples_that_are_not_finite_are_reported_with_their_position() {
    for bad in [f32::NAN, f32::INFINITY] {
        let stereo = WavSpec {
            channels: 2,
            ..spec(32, SampleFormat::Float)
        };
        let file = wav(stereo, |writer| {
            for sample in [0.0, 0.0, 0.0, bad] {
                writer.write_sample(sample).unwrap();
            }
        });
        let expected = TrackError::NotFinite {
            sample: 1,
            channel: 1,
        };
        assert_eq!(read(&file), Err(expected));
    }
}

/// A header of a WAV, of 16 bits.
fn header(samples_per_second: u32, channels: u32, samples: u64) -> Vec<u8> {
    let format = TrackFormat {
        samples_per_second,
        channels,
        samples,
    };
    wav_header(format, None).unwrap()
}

#[test]
fn tracks_that_no_model_takes_are_refused() {
    let silent = |header: Vec<u8>, bytes: usize| Bytes::from([header, vec![0; bytes]].concat());
    let too_long = 8000 * 3600 + 1;
    for (file, expected) in [
        (silent(header(48_000, 2, 0), 0), TrackError::Empty),
        (silent(header(7_500, 1, 8), 16), TrackError::Rate(7_500)),
        (silent(header(400_000, 1, 8), 16), TrackError::Rate(400_000)),
        (silent(header(48_000, 8, 2), 32), TrackError::Channels(8)),
        // What the header says is not believed: nothing is there.
        (silent(header(8_000, 1, too_long), 0), TrackError::TooLong),
        (silent(header(8_000, 1, 1_000_000), 16), TrackError::CutOff("WAV")),
        (silent(header(8_000, 1, 9), 16), TrackError::CutOff("WAV")),
    ] {
        assert_eq!(read(&file).unwrap_err(), expected);
    }
    for file in [
        "",
        "RIFF",
        "RIFF0000WAVE",
        "fLaC",
        "fLaC\0\0\0\x22",
        "not a sound",
    ] {
        assert!(read(&Bytes::from(file)).is_err(), "{file}");
    }
    let other = |samples_per_second, channels, samples| TrackFormat {
        samples_per_second,
        channels,
        samples,
    };
    for (format, expected) in [
        (other(7_500, 1, 100), TrackError::Rate(7_500)),
        (other(48_000, 8, 100), TrackError::Channels(8)),
    ] {
        let file = flac(format, &sound(format), None);
        assert_eq!(read(&file).unwrap_err(), expected);
    }
}

#[test]
fn a_truncated_or_contradictory_flac_is_refused() {
    let file = flac(STEREO, &sound(STEREO), None).to_vec();
    for end in [30, 200, file.len() / 2, file.len() - 1] {
        let cut = read(&Bytes::copy_from_slice(&file[..end]));
        assert_eq!(cut, Err(TrackError::CutOff("FLAC")), "{end} bytes");
    }
    // The number of samples is in the last 36 bits before the checksum of 16 bytes.
    let saying = |samples: u32| {
        let mut file = file.clone();
        file[22..26].copy_from_slice(&samples.to_be_bytes());
        read(&file.into())
    };
    assert!(saying(10_000).is_ok());
    assert!(matches!(saying(9_000), Err(TrackError::Unreadable { .. })));
    assert!(saying(11_000).is_err());
    assert_eq!(saying(0), saying(10_000), "0 is not known");
    assert_eq!(saying(u32::MAX), Err(TrackError::TooLong));
    // Tags that are longer than the file.
    let mut tags = file.clone();
    let description = 4 + 4 + 34;
    tags.splice(description..description, [4, 0xff, 0xff, 0xff]);
    assert_eq!(read(&tags.into()), Err(TrackError::CutOff("FLAC")));
    // Tags with nonsense in them are passed over.
    let mut tags = file;
    tags.splice(description..description, [4, 0, 0, 4, 0xff, 0xff, 0xff, 0xff]);
    assert!(read(&tags.into()).is_ok());
}

#[test]
fn decoding_a_small_file_of_long_silence_stops_at_the_memory_limit() {
    let format = TrackFormat {
        samples: 48_000 * 60,
        ..STEREO
    };
    let file = flac(format, &vec![0; 2 * 48_000 * 60], None);
    assert!(file.len() < 20_000);
    // The number of samples is in the last 36 bits before the checksum of 16 bytes: 0 is not known.
    let mut unsaid = file.to_vec();
    unsaid[22..26].fill(0);
    for (file, asked_at_most) in [(file.to_vec(), 1), (unsaid, 1000)] {
        let (mut left, mut asked) = (1_i64 << 20, 0);
        let refused = read_flac(&file, &Caller::staying(), |bytes| {
            asked += 1;
            left -= i64::try_from(bytes).unwrap();
            match left >= 0 {
                true => Ok(()),
                false => Err(TrackError::TooLong),
            }
        });
        assert_eq!(refused, Err(TrackError::TooLong));
        assert!(
            asked <= asked_at_most,
            "before it is decoded, if it says how much it is"
        );
        assert!(
            asked == 1 || left > -(1 << 16),
            "it was told with the first frame that did not fit"
        );
    }
}

#[test]
fn decoding_ends_when_the_client_has_gone() {
    let samples = sound(STEREO);
    let float = spec(32, SampleFormat::Float);
    let wav = wav(float, |writer| {
        (0..10).for_each(|_| writer.write_sample(0.5_f32).unwrap());
    });
    for file in [flac(STEREO, &samples, None), wav] {
        let read = |file: &Bytes| match media_type(file) {
            Some("audio/flac") => read_flac(file, &Caller::gone(), |_| Ok(())),
            _ => read_wav(file, &Caller::gone(), |_| Ok(())),
        };
        assert_eq!(read(&file), Err(TrackError::Gone));
    }
}

/// A file of one frame at which the decoder panics: its residuals are in more partitions than it has samples.
#[test]
fn a_frame_at_which_the_decoder_panics_is_damaged() {
    let mut file = [&b"fLaC\x80\0\0\x22\0\x10\0\x10\0\0\0\0\0\0"[..], &[0; 24]].concat();
    let rate_channels_bits: u32 = 48_000 << 12 | 15 << 4;
    file[18..22].copy_from_slice(&rate_channels_bits.to_be_bytes());
    let head = [0xff, 0xf8, 0x60, 0, 0, 15];
    let checksum = head.iter().fold(0_u8, |sum, byte| {
        (0..8).fold(sum ^ byte, |sum, _| sum << 1 ^ if sum >> 7 == 1 { 7 } else { 0 })
    });
    file.extend(head);
    file.push(checksum);
    file.extend([0x10, 0x3c, 0, 0, 0, 0, 0, 0]);
    let damaged = TrackError::Unreadable {
        what: "FLAC",
        problem: "a frame is damaged".to_owned(),
    };
    assert_eq!(read(&file.into()), Err(damaged));
}

#[test]
fn damaged_files_end_in_an_error_or_in_samples() {
    let samples = sound(TrackFormat {
        samples: 3000,
        ..STEREO
    });
    let format = TrackFormat {
        samples: 3000,
        ..STEREO
    };
    let files = [
        flac(format, &samples, Some(&recipe())),
        Bytes::from(
            [
                wav_header(format, Some(&recipe())).unwrap(),
                bytes_of(&samples).to_vec(),
            ]
            .concat(),
        ),
    ];
    let mut state = 7_u64;
    let mut random = move |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for file in files {
        for _ in 0..3000 {
            let mut damaged = file.to_vec();
            for _ in 0..=random(4) {
                // Most in its front, where lengths are.
                let front = [64, 700, damaged.len()][random(3)];
                let at = random(front.min(damaged.len()));
                damaged[at] = random(256) as u8;
            }
            let cut = random(3) * random(100);
            damaged.truncate(damaged.len() - cut);
            let _ = (recipe_of(&damaged), read(&damaged.into()));
        }
    }
}
