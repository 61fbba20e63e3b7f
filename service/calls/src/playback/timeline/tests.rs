use bytes::Bytes;

use super::*;

const RATE: u32 = 1000;

fn settings(crossfade: u64, repeats: bool) -> PlaybackSettings {
    PlaybackSettings {
        samples_per_second: RATE,
        channels: 1,
        lead: 400,
        crossfade,
        repeats,
    }
}

fn format(samples: u64) -> MediaFormat {
    MediaFormat::Audio {
        samples_per_second: RATE,
        channels: 1,
        samples,
    }
}

/// A part of a track of this length, whose samples are all `level`.
fn part(level: i16, length: u64, first: u64, samples: u64) -> Piece {
    Piece {
        track: String::new(),
        format: format(length),
        first,
        data: Bytes::from(level.to_le_bytes().repeat(samples as usize)),
    }
}

fn whole(timeline: &mut Timeline, segment: u32, level: i16, length: u64) {
    timeline.add(segment, &part(level, length, 0, length)).unwrap();
}

/// All that sounds, up to so many samples, with the segment of each.
fn sound(timeline: &mut Timeline, most: u64) -> Vec<(u32, i16)> {
    let mut all = Vec::new();
    while (all.len() as u64) < most {
        let first = timeline.made();
        let (rendered, _) = timeline.render((most - all.len() as u64).min(100));
        let Some(rendered) = rendered else { break };
        assert_eq!(rendered.first, first, "chunks follow each other");
        let samples = rendered.samples.chunks_exact(2);
        all.extend(samples.map(|pair| (rendered.segment, i16::from_le_bytes([pair[0], pair[1]]))));
    }
    all
}

fn levels(timeline: &mut Timeline, most: u64) -> Vec<i16> {
    sound(timeline, most)
        .into_iter()
        .map(|(_, level)| level)
        .collect()
}

#[test]
fn segments_play_in_order_of_their_numbers_whenever_they_arrive() {
    let mut timeline = Timeline::new(settings(0, false));
    for segment in 1..=3 {
        timeline.expect(segment, SegmentStart::WhenOver);
    }
    whole(&mut timeline, 3, 30, 300);
    assert!(levels(&mut timeline, 1000).is_empty(), "the first is not there");
    whole(&mut timeline, 1, 10, 300);
    assert_eq!(levels(&mut timeline, 1000), [10; 300]);
    assert!(
        !timeline.is_within_segment(),
        "silence between segments is no gap"
    );
    whole(&mut timeline, 2, 20, 300);
    assert_eq!(levels(&mut timeline, 1000), [[20; 300], [30; 300]].concat());
    assert!(!timeline.is_within_segment());
}

#[test]
fn a_failed_segment_is_skipped() {
    let mut timeline = Timeline::new(settings(0, false));
    timeline.expect(1, SegmentStart::WhenOver);
    timeline.expect(2, SegmentStart::WhenOver);
    whole(&mut timeline, 2, 20, 300);
    timeline.fail(1);
    assert_eq!(levels(&mut timeline, 1000), [20; 300]);
}

#[test]
fn the_last_segment_repeats_until_the_next_is_ready() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 10, 300);
    assert_eq!(levels(&mut timeline, 700), [10; 700]);
    timeline.expect(2, SegmentStart::WhenOver);
    whole(&mut timeline, 2, 20, 300);
    let next = levels(&mut timeline, 300);
    assert_eq!(
        next,
        [[10; 200].to_vec(), [20; 100].to_vec()].concat(),
        "at its end, not within"
    );
}

#[test]
fn an_immediate_segment_starts_at_the_current_place_and_supersedes_pending_ones() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 10, 1000);
    assert_eq!(levels(&mut timeline, 250).len(), 250);
    timeline.expect(2, SegmentStart::WhenOver);
    timeline.expect(3, SegmentStart::AtOnce);
    // It comes from the middle on, as it is decoded.
    timeline.add(3, &part(30, 1000, 200, 300)).unwrap();
    let (still, change) = timeline.render(10);
    assert_eq!(
        (still.unwrap().segment, change.superseded),
        (1, vec![]),
        "less than the lead is there"
    );
    timeline.add(3, &part(30, 1000, 500, 500)).unwrap();
    let (now, change) = timeline.render(10);
    let now = now.unwrap();
    assert_eq!((now.segment, now.first_of_segment), (3, 260));
    assert_eq!(change.superseded, [2]);
    timeline.add(3, &part(30, 1000, 0, 200)).unwrap();
    assert!(sound(&mut timeline, 2000).iter().all(|&sample| sample == (3, 30)));
}

#[test]
fn an_immediate_segment_may_start_at_its_beginning() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 10, 1000);
    sound(&mut timeline, 250);
    timeline.expect(2, SegmentStart::AtOnceFromStart);
    whole(&mut timeline, 2, 20, 500);
    let (now, _) = timeline.render(10);
    assert_eq!(now.map(|now| now.first_of_segment), Some(0));
}

#[test]
fn a_crossfade_between_segments_has_no_step() {
    for (start, before) in [(SegmentStart::AtOnce, 250), (SegmentStart::WhenOver, 500)] {
        let mut timeline = Timeline::new(settings(50, true));
        timeline.expect(1, SegmentStart::WhenOver);
        whole(&mut timeline, 1, 1000, 600);
        let mut all = levels(&mut timeline, before);
        timeline.expect(2, start);
        whole(&mut timeline, 2, -1000, 600);
        all.extend(levels(&mut timeline, 300));
        let steps = all.windows(2).map(|pair| (pair[0] - pair[1]).abs());
        assert!(steps.max() < Some(70), "{start:?}: {all:?}");
        assert_eq!((all[0], all[before as usize + 299]), (1000, -1000), "{start:?}");
        let mid = all.iter().filter(|level| level.abs() < 1000).count();
        // All 50, but for those whose weight is less than a rounding.
        assert!((46..=50).contains(&mid), "{start:?}: {mid}");
    }
}

#[test]
fn a_repeated_segment_keeps_its_length_and_has_no_step() {
    let mut timeline = Timeline::new(settings(50, true));
    timeline.expect(1, SegmentStart::WhenOver);
    let ramp: Vec<u8> = (0..600_i16).flat_map(|at| (at * 20).to_le_bytes()).collect();
    let piece = Piece {
        data: ramp.into(),
        ..part(0, 600, 0, 1)
    };
    timeline.add(1, &piece).unwrap();
    let all = levels(&mut timeline, 1200);
    assert_eq!(all[0], 0);
    assert_eq!((all[300], all[900]), (6000, 6000), "600 samples later");
    let steps = all
        .windows(2)
        .map(|pair| (i32::from(pair[0]) - i32::from(pair[1])).abs());
    assert!(steps.max() < Some(1000), "a hard seam would be 11,980");
}

#[test]
fn a_segment_that_is_shorter_than_the_fade_into_it_is_followed_by_the_next() {
    for short in [1, 50, 300, 999, 1000, 1001] {
        let mut timeline = Timeline::new(settings(1000, false));
        for (segment, length) in [(1, 4000), (2, short), (3, 4000)] {
            timeline.expect(segment, SegmentStart::WhenOver);
            whole(&mut timeline, segment, 1000, length);
        }
        let all = sound(&mut timeline, 20_000);
        let of_last = all.iter().filter(|(segment, _)| *segment == 3).count();
        assert_eq!(of_last, 4000, "after a segment of {short} samples");
        assert!(!timeline.is_within_segment());
    }
}

#[test]
fn an_immediate_segment_that_begins_near_its_end_is_followed_by_the_next() {
    let mut timeline = Timeline::new(settings(50, false));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 1000, 1000);
    assert_eq!(levels(&mut timeline, 290).len(), 290);
    timeline.expect(2, SegmentStart::AtOnce);
    whole(&mut timeline, 2, 1000, 300);
    timeline.expect(3, SegmentStart::WhenOver);
    whole(&mut timeline, 3, 1000, 400);
    let segments: Vec<u32> = sound(&mut timeline, 2000)
        .into_iter()
        .map(|(segment, _)| segment)
        .collect();
    assert_eq!(segments, [[2; 10].to_vec(), [3; 400].to_vec()].concat());
}

#[test]
fn a_segment_that_fails_after_the_one_before_it_is_over_is_followed_by_the_next() {
    let mut timeline = Timeline::new(settings(50, false));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 1000, 300);
    timeline.expect(2, SegmentStart::AtOnceFromStart);
    assert_eq!(levels(&mut timeline, 200).len(), 200);
    timeline.add(2, &part(1000, 1000, 0, 500)).unwrap();
    assert_eq!(levels(&mut timeline, 400).len(), 400, "past the end of the first");
    timeline.fail(2);
    timeline.expect(3, SegmentStart::WhenOver);
    whole(&mut timeline, 3, 1000, 400);
    let segments = sound(&mut timeline, 1000);
    assert_eq!(segments.iter().filter(|(segment, _)| *segment == 3).count(), 400);
}

#[test]
fn a_chunk_at_a_repetition_begins_with_the_segments_first_sample() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 10, 300);
    let mut places = Vec::new();
    for _ in 0..4 {
        let (rendered, _) = timeline.render(150);
        places.extend(rendered.map(|rendered| rendered.first_of_segment));
    }
    assert_eq!(places, [0, 150, 0, 150]);
}

#[test]
fn the_old_segment_resumes_in_time_if_the_new_one_fails() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    let ramp: Vec<u8> = (0..1000_i16).flat_map(i16::to_le_bytes).collect();
    let piece = Piece {
        data: ramp.into(),
        ..part(0, 1000, 0, 1)
    };
    timeline.add(1, &piece).unwrap();
    sound(&mut timeline, 200);
    timeline.expect(2, SegmentStart::AtOnce);
    timeline.add(2, &part(20, 1000, 200, 450)).unwrap();
    assert_eq!(levels(&mut timeline, 100), [20; 100]);
    timeline.fail(2);
    assert_eq!(levels(&mut timeline, 3), [300, 301, 302]);
}

#[test]
fn sound_stops_at_missing_samples_and_resumes_there() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    timeline.add(1, &part(10, 1000, 0, 249)).unwrap();
    assert_eq!(
        levels(&mut timeline, 10),
        Vec::<i16>::new(),
        "a quarter of a second is what the first needs"
    );
    timeline.add(1, &part(10, 1000, 249, 51)).unwrap();
    assert_eq!(levels(&mut timeline, 1000), [10; 300]);
    assert!(timeline.is_within_segment());
    timeline.add(1, &part(11, 1000, 300, 700)).unwrap();
    assert_eq!(levels(&mut timeline, 5), [11; 5]);
}

#[test]
fn sound_of_another_rate_and_pieces_of_another_length_are_refused() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    timeline.expect(2, SegmentStart::WhenOver);
    let other = Piece {
        format: MediaFormat::Audio {
            samples_per_second: 48_000,
            channels: 1,
            samples: 10,
        },
        ..part(1, 10, 0, 10)
    };
    assert!(timeline.add(1, &other).unwrap_err().contains("48000"));
    whole(&mut timeline, 2, 1, 10);
    assert!(timeline.add(2, &part(1, 20, 15, 5)).is_err());
    assert!(
        timeline.add(9, &part(1, 20, 15, 5)).is_ok(),
        "of a segment that is given up"
    );
}

/// The largest step of what sounds, in segments of one level each.
fn largest_step(timeline: &mut Timeline, most: u64, last: &mut Option<i16>) -> i32 {
    let mut largest = 0;
    for level in levels(timeline, most) {
        let before = last.replace(level).unwrap_or(level);
        largest = largest.max((i32::from(level) - i32::from(before)).abs());
    }
    largest
}

#[test]
fn a_change_near_the_end_of_the_old_segment_has_no_step() {
    // At once and when it is over, at each place near the end of one that is repeated.
    for start in [
        SegmentStart::AtOnce,
        SegmentStart::AtOnceFromStart,
        SegmentStart::WhenOver,
    ] {
        for place in (480..=620).step_by(7) {
            let mut timeline = Timeline::new(settings(80, true));
            timeline.expect(1, SegmentStart::WhenOver);
            whole(&mut timeline, 1, 1000, 600);
            let mut last = None;
            let mut largest = largest_step(&mut timeline, place, &mut last);
            timeline.expect(2, start);
            whole(&mut timeline, 2, -1000, 600);
            largest = largest.max(largest_step(&mut timeline, 1500, &mut last));
            assert!(largest < 160, "{start:?} at {place}: {largest}");
        }
    }
}

#[test]
fn a_change_before_a_segment_has_faded_in_has_no_step() {
    // The old segment is repeated, and ends while the new one fades in: then the next may begin.
    for place in (530..600).step_by(7) {
        let mut timeline = Timeline::new(settings(80, true));
        timeline.expect(1, SegmentStart::WhenOver);
        whole(&mut timeline, 1, 900, 600);
        let mut last = None;
        let mut largest = largest_step(&mut timeline, place, &mut last);
        for (segment, level) in [(2, 900), (3, -300)] {
            timeline.expect(segment, SegmentStart::AtOnceFromStart);
            whole(&mut timeline, segment, level, 600);
            largest = largest.max(largest_step(&mut timeline, 600 - place, &mut last));
        }
        assert!(largest < 160, "at {place}: {largest}");
    }
}

#[test]
fn the_last_complete_segment_resumes_if_several_fail() {
    let mut timeline = Timeline::new(settings(0, true));
    timeline.expect(1, SegmentStart::WhenOver);
    whole(&mut timeline, 1, 10, 1000);
    sound(&mut timeline, 100);
    for segment in [2, 3] {
        timeline.expect(segment, SegmentStart::AtOnce);
        timeline.add(segment, &part(20, 1000, 0, 800)).unwrap();
        assert_eq!(levels(&mut timeline, 50), [20; 50]);
    }
    timeline.fail(2);
    timeline.fail(3);
    assert_eq!(levels(&mut timeline, 1500), [10; 1500]);
}

#[test]
fn a_segment_that_fails_at_any_place_leaves_no_step() {
    for place in (1..300).step_by(7) {
        for repeats in [true, false] {
            let mut timeline = Timeline::new(settings(80, repeats));
            timeline.expect(1, SegmentStart::WhenOver);
            whole(&mut timeline, 1, 900, 1500);
            let mut last = None;
            let mut largest = largest_step(&mut timeline, 500, &mut last);
            timeline.expect(2, SegmentStart::AtOnceFromStart);
            timeline.add(2, &part(-900, 600, 0, 450)).unwrap();
            largest = largest.max(largest_step(&mut timeline, place, &mut last));
            timeline.fail(2);
            largest = largest.max(largest_step(&mut timeline, 300, &mut last));
            assert!(largest < 100, "at {place}: {largest}");
            assert_eq!(last, Some(900));
        }
    }
}

#[test]
fn segments_that_fail_one_after_the_other_leave_no_step() {
    for place in (1..120).step_by(7) {
        let mut timeline = Timeline::new(settings(80, true));
        timeline.expect(1, SegmentStart::WhenOver);
        whole(&mut timeline, 1, 900, 3000);
        let mut last = None;
        let mut largest = largest_step(&mut timeline, 500, &mut last);
        for (segment, samples) in [(2, 100), (3, place)] {
            timeline.expect(segment, SegmentStart::AtOnceFromStart);
            timeline.add(segment, &part(-900, 600, 0, 450)).unwrap();
            largest = largest.max(largest_step(&mut timeline, samples, &mut last));
        }
        for segment in [2, 3] {
            timeline.fail(segment); // the first of them may fade out still
            largest = largest.max(largest_step(&mut timeline, 20, &mut last));
        }
        largest = largest.max(largest_step(&mut timeline, 300, &mut last));
        assert!(largest < 100, "at {place}: {largest}");
        assert_eq!(last, Some(900));
    }
}

proptest::proptest! {
    /// Segments of one level each, which arrive at any time or not at all: the sound never jumps.
    #[test]
    fn no_order_of_events_makes_a_click(events in proptest::collection::vec((0_u8..6, 2_u32..8, 1_u64..90), 1..80)) {
        let mut timeline = Timeline::new(settings(80, true));
        timeline.expect(1, SegmentStart::WhenOver);
        whole(&mut timeline, 1, 900, 600);
        let (mut expected, mut last, mut came) = (1, None, Vec::new());
        for (event, segment, samples) in events {
            match event {
                0 => {
                    expected += 1;
                    let starts = [SegmentStart::WhenOver, SegmentStart::AtOnce, SegmentStart::AtOnceFromStart];
                    timeline.expect(expected, starts[segment as usize % 3]);
                }
                1 if segment <= expected && !came.contains(&segment) => timeline.fail(segment),
                2 if segment <= expected => {
                    came.push(segment);
                    let level = [-900, 300, 900, -300][segment as usize % 4];
                    timeline.add(segment, &part(level, 600, 0, 600)).unwrap();
                }
                _ => {
                    let largest = largest_step(&mut timeline, samples * 5, &mut last);
                    proptest::prop_assert!(largest < 160, "{largest}");
                }
            }
        }
    }

    /// For pieces in any order: chunks follow each other, only samples that have arrived sound, and the segments that
    /// sound ascend.
    #[test]
    fn rendered_sound_is_contiguous_for_any_order_of_events(
        events in proptest::collection::vec((0_u8..6, 1_u32..8, 0_u64..5), 1..60),
        crossfade in 0_u64..80,
        repeats: bool,
    ) {
        let mut timeline = Timeline::new(settings(crossfade, repeats));
        let mut expected = 0;
        let mut failed = Vec::new();
        let mut last = 0;
        for (event, segment, part_of) in events {
            match event {
                0 => {
                    expected += 1;
                    timeline.expect(expected, [SegmentStart::WhenOver, SegmentStart::AtOnce][segment as usize % 2]);
                }
                1 if segment <= expected => {
                    timeline.fail(segment);
                    failed.push(segment);
                    last = 0; // an earlier segment may continue
                }
                2 | 3 if segment <= expected => {
                    timeline.add(segment, &part(7, 500, part_of * 100, 100)).unwrap();
                }
                _ => {
                    let made = timeline.made();
                    for (number, level) in sound(&mut timeline, 130) {
                        proptest::prop_assert!(number >= last && !failed.contains(&number));
                        proptest::prop_assert!((0..=7).contains(&level));
                        last = number;
                    }
                    proptest::prop_assert!(timeline.made() <= made + 130);
                }
            }
        }
    }

    /// Segments of any length that are whole sound in their order, and the last one to its end.
    #[test]
    fn segments_that_are_there_sound_to_the_end_of_the_last(
        segments in proptest::collection::vec((1_u64..300, 0_usize..3, 0_u64..200), 1..12),
        crossfade in 0_u64..150,
    ) {
        let starts = [SegmentStart::WhenOver, SegmentStart::AtOnce, SegmentStart::AtOnceFromStart];
        let mut timeline = Timeline::new(settings(crossfade, false));
        for ((length, start, rendered), segment) in segments.iter().zip(1..) {
            timeline.expect(segment, starts[*start]);
            whole(&mut timeline, segment, 7, *length);
            sound(&mut timeline, *rendered);
        }
        sound(&mut timeline, 10_000);
        check_all_are_over(&mut timeline, segments.len() as u32)?;
    }
}

/// Checks that all segments are over, so that a further segment sounds.
fn check_all_are_over(
    timeline: &mut Timeline,
    last: u32,
) -> Result<(), proptest::test_runner::TestCaseError> {
    proptest::prop_assert!(!timeline.is_within_segment());
    timeline.expect(last + 1, SegmentStart::WhenOver);
    whole(timeline, last + 1, 7, 250);
    let all = sound(timeline, 1000);
    proptest::prop_assert_eq!(all.len(), 250);
    proptest::prop_assert!(all.iter().all(|(segment, _)| *segment == last + 1));
    Ok(())
}
