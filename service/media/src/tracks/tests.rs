mod any_bytes;

use bytes::Bytes;
use hound::{SampleFormat, WavSpec, WavWriter};

use super::*;
use crate::EncodedFile;

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

/// Reads a file and grants all the room that it asks for. The room must equal the size of the samples.
fn read(file: &Bytes) -> Result<Clip, TrackError> {
    let mut asked = 0;
    let room = |bytes| {
        asked += bytes;
        Ok::<(), TrackError>(())
    };
    let clip = match media_type(file) {
        Ok("audio/flac") => read_flac(file, &CancelToken::default(), room),
        _ => read_wav(file, &CancelToken::default(), room),
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
        // Some of them twice, as two streams add them.
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
        assert_eq!(crate::recipe_of(&file).unwrap(), recipe());
        assert_eq!(read(&file).unwrap().data, bytes_of(&samples));
        // A file that is cut at any byte is not read as another type.
        for cut in 0..600 {
            let found = recipe_of(&file[..cut]);
            assert!(found.is_none() || found.as_ref() == Some(&json));
        }
    }
    for file in [flac(STEREO, &samples, None), wav(None)] {
        assert_eq!(recipe_of(&file), None);
        let told = crate::recipe_of(&file).unwrap_err();
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

/// A chunk of a WAV; `stated` is the length in its head.
fn chunk(name: &[u8; 4], stated: u32, content: &[u8]) -> Vec<u8> {
    [name, &stated.to_le_bytes()[..], content].concat()
}

/// The format chunk of a WAV: mono, 8,000 samples a second.
fn fmt(tag: u16, bits: u16, after: &[u8]) -> Vec<u8> {
    let bytes = bits.div_ceil(8);
    let head = [
        &tag.to_le_bytes()[..],
        &1_u16.to_le_bytes(),
        &8_000_u32.to_le_bytes(),
        &(8_000 * u32::from(bytes)).to_le_bytes(),
        &bytes.to_le_bytes(),
        &bits.to_le_bytes(),
        after,
    ];
    let content = head.concat();
    chunk(b"fmt ", content.len() as u32, &content)
}

fn riff(start: &[u8; 4], stated: u32, chunks: &[Vec<u8>]) -> Bytes {
    [start, &stated.to_le_bytes()[..], b"WAVE", &chunks.concat()]
        .concat()
        .into()
}

#[test]
fn wav_files_are_read_as_programs_write_them() {
    const UNKNOWN: u32 = u32::MAX;
    let samples = [-32_768, -2, 0, 5, 32_767_i16];
    let bytes = bytes_of(&samples);
    let length = bytes.len() as u32;
    let pcm = || fmt(1, 16, &[]);
    let data = |stated: u32| chunk(b"data", stated, &bytes);
    let guid = |tag: u8| {
        [
            &[22, 0, 16, 0, 4, 0, 0, 0, tag, 0][..],
            b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71",
        ]
        .concat()
    };
    let ds64 = |length: u64| {
        let content = [
            0_u64.to_le_bytes(),
            length.to_le_bytes(),
            5_u64.to_le_bytes(),
            [0; 8],
        ]
        .concat();
        chunk(b"ds64", 28, &content[..28])
    };
    let odd = |pad: &[u8]| [chunk(b"LIST", 9, b"INFOabcde"), pad.to_vec()].concat();
    for (what, file) in [
        (
            "ffmpeg to a pipe",
            riff(b"RIFF", UNKNOWN, &[pcm(), odd(b"\0"), data(UNKNOWN)]),
        ),
        (
            "sox to a pipe",
            riff(b"RIFF", 0x7fff_f024, &[pcm(), data(0x7fff_f000)]),
        ),
        (
            "arecord to a pipe",
            riff(b"RIFF", 0x8000_0024, &[pcm(), data(0x8000_0000)]),
        ),
        ("lengths never written", riff(b"RIFF", 0, &[pcm(), data(0)])),
        (
            "lengths of a file without samples",
            riff(b"RIFF", 36, &[pcm(), data(0)]),
        ),
        (
            "a pipe ended in a sample",
            [&riff(b"RIFF", UNKNOWN, &[pcm(), data(UNKNOWN)])[..], b"\x01"]
                .concat()
                .into(),
        ),
        (
            "odd chunk, padded",
            riff(b"RIFF", 0, &[pcm(), odd(b"\0"), data(length)]),
        ),
        (
            "odd chunk, not padded",
            riff(b"RIFF", 0, &[pcm(), odd(b""), data(length)]),
        ),
        (
            "bext before, tags after",
            riff(
                b"RIFF",
                0,
                &[
                    chunk(b"bext", 602, &[0; 602]),
                    pcm(),
                    data(length),
                    chunk(b"id3 ", 99, b"ID3"),
                ],
            ),
        ),
        (
            "extensible",
            riff(b"RIFF", 0, &[fmt(0xfffe, 16, &guid(1)), data(length)]),
        ),
        (
            "RF64",
            riff(b"RF64", UNKNOWN, &[ds64(10), pcm(), data(UNKNOWN), odd(b"\0")]),
        ),
        ("BW64", riff(b"BW64", UNKNOWN, &[ds64(10), pcm(), data(length)])),
        (
            "RF64 to a pipe",
            riff(b"RF64", UNKNOWN, &[ds64(u64::MAX), pcm(), data(UNKNOWN)]),
        ),
    ] {
        assert_eq!(media_type(&file), Ok("audio/wav"), "{what}");
        assert_eq!(read(&file).map(|clip| clip.data), Ok(bytes.clone()), "{what}");
    }
    let of = |floats: &[u8], tag: u16, bits: u16, after: &[u8]| {
        let file = riff(
            b"RIFF",
            0,
            &[fmt(tag, bits, after), chunk(b"data", floats.len() as u32, floats)],
        );
        read(&file).map(|clip| clip.data)
    };
    let doubles = [-1.0_f64, 0.5, 7.0].map(f64::to_le_bytes).concat();
    let expected = bytes_of(&[-32_768, 16_384, 32_767]);
    assert_eq!(of(&doubles, 3, 64, &[]), Ok(expected.clone()));
    assert_eq!(of(&doubles, 0xfffe, 64, &guid(3)), Ok(expected));
    // 20 bits are the upper ones of 24.
    assert_eq!(of(&[0xf0, 0xff, 0x7f], 1, 20, &[]), Ok(bytes_of(&[32_767])));
    let said = of(&[0; 8], 2, 4, &[]).unwrap_err().to_string();
    assert!(said.contains("ADPCM"), "{said}");
}

#[test]
fn a_flac_is_read_after_the_tags_of_taggers_and_before_those_at_its_end() {
    let file = flac(STEREO, &sound(STEREO), Some(&recipe()));
    let tag = |flags: u8, foot: usize| {
        [
            &[b'I', b'D', b'3', 4, 0, flags, 0, 0, 1, 2][..],
            &vec![0xff; 130 + foot],
        ]
        .concat()
    };
    let id3v1 = [&b"TAG"[..], &[b' '; 125]].concat();
    for file in [
        [&tag(0, 0)[..], &file].concat(),
        [&tag(0x10, 10)[..], &tag(0, 0), &file].concat(),
        [&tag(0, 0)[..], &file, &id3v1].concat(),
    ] {
        let file = Bytes::from(file);
        assert_eq!(media_type(&file), Ok("audio/flac"));
        assert_eq!(read(&file).unwrap().data, bytes_of(&sound(STEREO)));
        assert!(recipe_of(&file).is_some());
    }
}

#[test]
fn tracks_that_are_not_read_are_named() {
    let ogg = |head: &[u8]| [b"OggS\0\x02", &[0; 22][..], head].concat();
    for (file, name) in [
        (b"ID3\x04\0\0\0\0\0\x02xx\xff\xfb\x90\0".to_vec(), "an MP3"),
        (b"\xff\xfb\x90\0".to_vec(), "an MP3"),
        (b"\xff\xf1\x50\x80".to_vec(), "an AAC"),
        (ogg(b"OpusHead"), "Opus in an Ogg"),
        (ogg(b"\x7fFLAC"), "FLAC in an Ogg"),
        (ogg(b"\x01vorbis"), "Vorbis in an Ogg"),
        (b"\0\0\0\x20ftypM4A ".to_vec(), "an M4A"),
        (b"FORM\0\0\0\0AIFFCOMM".to_vec(), "an AIFF"),
        (b"FORM\0\0\0\0AIFCFVER".to_vec(), "an AIFF-C"),
    ] {
        let file = Bytes::from(file);
        let problem = TrackError::Foreign(name);
        assert!(problem.to_string().contains("ffmpeg -i"));
        assert_eq!(media_type(&file), Err(problem.clone()));
        // Whatever it is said to be.
        assert_eq!(
            read_wav(&file, &CancelToken::default(), |_| Ok(())),
            Err(problem.clone())
        );
        assert_eq!(
            read_flac(&file, &CancelToken::default(), |_| Ok(())),
            Err(problem)
        );
    }
    assert_eq!(media_type(b""), Err(TrackError::NoBytes));
    assert_eq!(media_type(b"not a sound"), Err(TrackError::Unknown));
}

#[test]
fn every_kind_of_track_refuses_a_file_that_is_cut_off() {
    let samples = sound(STEREO);
    let wav = [
        wav_header(STEREO, Some(&recipe())).unwrap(),
        bytes_of(&samples).to_vec(),
    ]
    .concat();
    for file in [flac(STEREO, &samples, Some(&recipe())), wav.into()] {
        assert!(read(&file).is_ok());
        for tenth in 0..10 {
            let cut = file.slice(..file.len() * tenth / 10);
            assert!(read(&cut).is_err(), "{tenth} tenths");
        }
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
    let missing = |bytes| TrackError::Missing { what: "WAV", bytes };
    for (file, expected) in [
        (silent(header(48_000, 2, 0), 0), TrackError::Empty),
        (silent(header(7_500, 1, 8), 16), TrackError::Rate(7_500)),
        (silent(header(400_000, 1, 8), 16), TrackError::Rate(400_000)),
        (silent(header(48_000, 8, 2), 32), TrackError::Channels(8)),
        // The header is not trusted: the file has no samples.
        (silent(header(8_000, 1, too_long), 0), TrackError::TooLong),
        (silent(header(8_000, 1, 1_000_000), 16), missing(1_999_984)),
        (silent(header(8_000, 1, 9), 16), missing(2)),
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
    // Tags with invalid contents are skipped.
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
        let refused = read_flac(&file, &CancelToken::default(), |bytes| {
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

/// The token of work that is cancelled.
fn cancelled() -> CancelToken {
    CancelToken::new().0
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
            Ok("audio/flac") => read_flac(file, &cancelled(), |_| Ok(())),
            _ => read_wav(file, &cancelled(), |_| Ok(())),
        };
        assert_eq!(read(&file), Err(TrackError::Cancelled));
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
