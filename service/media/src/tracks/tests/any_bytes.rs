//! For any bytes of a WAV or FLAC file, reading ends in an error or in a valid track.

use bolero::check;

use super::*;
use crate::edits::Changes;

const SHORT: TrackFormat = TrackFormat {
    samples: 1500,
    ..STEREO
};

/// Reads a file, and its recipe.
fn check_file(file: Vec<u8>) {
    let _ = recipe_of(&file);
    let _ = media_type(&file);
    if let Ok(clip) = read(&file.into()) {
        assert_eq!(clip.format.bytes(), Some(clip.data.len() as u64));
        assert_eq!(TrackFormat::of(&clip.format).unwrap().check(), Ok(()));
    }
}

#[test]
fn any_flac_is_read_safely() {
    let samples = sound(SHORT);
    let mut after_tags = b"ID3\x04\0\0\0\0\0\x02\0\0".to_vec();
    after_tags.extend(flac(SHORT, &samples, None));
    let files = [flac(SHORT, &samples, Some(&recipe())).to_vec(), after_tags];
    check!()
        .with_iterations(2000)
        .with_max_len(Changes::MAX_LEN)
        .with_type::<Changes>()
        .for_each(|changes| check_file(changes.of(&files)));
}

#[test]
fn any_wav_is_read_safely() {
    let samples = bytes_of(&sound(SHORT)).to_vec();
    let ours = [wav_header(SHORT, Some(&recipe())).unwrap(), samples].concat();
    let floats = wav(spec(32, SampleFormat::Float), |writer| {
        (0..50).for_each(|number| writer.write_sample(number as f32 / 50.0).unwrap());
    });
    let odd = wav(spec(24, SampleFormat::Int), |writer| {
        (0..51).for_each(|number| writer.write_sample(number).unwrap());
    });
    let files = [ours, floats.to_vec(), odd.to_vec()];
    check!()
        .with_iterations(5000)
        .with_max_len(Changes::MAX_LEN)
        .with_type::<Changes>()
        .for_each(|changes| check_file(changes.of(&files)));
}
