//! Memory that a track takes while it is decoded, against what was asked for. The counter is the process's, so this is the only test
//! of its binary.
#![allow(clippy::unwrap_used)]

use gpu::allocator;
use media::tracks::{TrackError, TrackFile, TrackFormat, read_flac};
use media::{CancelToken, FilePosition};

#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

#[test]
fn a_flac_is_decoded_in_the_memory_that_was_asked_for() {
    // A little more than a power of two: a vector that doubles would take nearly twice as much.
    let format = TrackFormat {
        samples_per_second: 48_000,
        channels: 2,
        samples: (1 << 22) + (1 << 18),
    };
    let bytes = format.samples * 4;
    let mut file = TrackFile::new(format, None).unwrap();
    file.add(0, &vec![0; bytes as usize].into()).unwrap();
    let file = file.finish().unwrap();
    let file = file
        .read(&mut FilePosition::default(), usize::MAX)
        .unwrap()
        .to_vec();
    // The number of samples is in the last 36 bits before the checksum of 16 bytes: 0 is not known.
    let mut unsaid = file.clone();
    unsaid[22..26].fill(0);
    let cancel = CancelToken::default();
    for (file, most) in [(&file, bytes + (1 << 20)), (&unsaid, bytes * 9 / 8 + (1 << 20))] {
        let (before, mut asked) = (allocator::mark().0, 0);
        let room = |bytes| {
            asked += bytes;
            Ok::<_, TrackError>(())
        };
        let clip = read_flac(file, &cancel, room).unwrap();
        let taken = allocator::peak_since_mark().0 - before;
        assert_eq!((asked, clip.data.len() as u64), (bytes, bytes));
        assert!(taken <= most, "{taken} bytes taken for {bytes}");
    }
}
