//! The MP4 file around encoded frames and sound (ISO/IEC 14496-12, -14 and -15).

use std::num::NonZeroU32;

use bytes::Bytes;
use shiguredo_mp4::boxes::{
    AudioSampleEntryFields, Avc1Box, AvccBox, Brand, Co64Box, DinfBox, EdtsBox, ElstBox, ElstEntry, EsdsBox,
    FtypBox, HdlrBox, MdhdBox, MdiaBox, MinfBox, MoovBox, Mp4aBox, MvhdBox, SampleEntry, SmhdBox, StblBox,
    StcoBox, StscBox, StscEntry, StsdBox, StssBox, StszBox, SttsBox, SttsEntry, TkhdBox, TrakBox,
    VisualSampleEntryFields, VmhdBox,
};
use shiguredo_mp4::descriptors::{
    DecoderConfigDescriptor, DecoderSpecificInfo, EsDescriptor, SlConfigDescriptor,
};
use shiguredo_mp4::{BoxHeader, BoxSize, BoxType, Either, Encode as _, FixedPointNumber, Mp4FileTime, Uint};

use super::h264::ParameterSets;
use super::layout::{Chunk, Extent, Track, chunks_of};
use super::metadata::{metadata, opaque};
use super::sound::{EncodedSound, PACKET_SAMPLES};
use super::{FilmError, FilmFormat, Sample};
use crate::Recipe;

/// Numbers of the tracks.
const FRAMES: u32 = 1;
const SOUND: u32 = 2;
/// No time, so that the same film is the same file.
const TIME: Mp4FileTime = Mp4FileTime::from_secs(0);

/// Whether this is the start of an MP4 file.
pub fn is_mp4(file: &[u8]) -> bool {
    file.get(4..8) == Some(b"ftyp")
}

/// What a film's file has.
pub(super) struct Contents<'a> {
    pub(super) format: &'a FilmFormat,
    pub(super) sets: &'a ParameterSets,
    pub(super) samples: &'a [Sample],
    pub(super) sound: Option<&'a EncodedSound>,
}

impl Contents<'_> {
    /// The chunks of the file, in their order.
    pub(super) fn chunks(&self) -> Vec<Chunk> {
        let frames = Extent {
            samples: self.samples.len(),
            per_second: f64::from(self.format.frames_per_second),
        };
        let sound = self.sound.map(|sound| Extent {
            samples: sound.packets.len(),
            per_second: f64::from(sound.format.samples_per_second) / f64::from(PACKET_SAMPLES),
        });
        chunks_of(frames, sound)
    }

    fn sizes(&self, track: Track) -> Vec<u32> {
        let size = |data: &Bytes| data.len() as u32;
        match (track, self.sound) {
            (Track::Frames, _) => self.samples.iter().map(|sample| size(&sample.data)).collect(),
            (Track::Sound, Some(sound)) => sound.packets.iter().map(size).collect(),
            (Track::Sound, None) => Vec::new(),
        }
    }
}

/// Everything before the data: the type of the file, its index, and the header of the data, which follow in these chunks.
pub(super) fn head(
    contents: &Contents<'_>,
    chunks: &[Chunk],
    recipe: Option<&Recipe>,
) -> Result<Vec<u8>, FilmError> {
    let brands = [Brand::ISOM, Brand::ISO2, Brand::AVC1, Brand::MP41];
    let kind = FtypBox {
        major_brand: Brand::ISOM,
        minor_version: 512,
        compatible_brands: brands.to_vec(),
    };
    let kind = kind.encode_to_vec().map_err(failed)?;
    let sizes = [Track::Frames, Track::Sound].map(|track| contents.sizes(track));
    let bytes_of = |chunk: &Chunk| -> u64 {
        let sizes = &sizes[usize::from(chunk.track == Track::Sound)];
        sizes[chunk.samples.clone()]
            .iter()
            .map(|&size| u64::from(size))
            .sum()
    };
    let data: u64 = chunks.iter().map(bytes_of).sum();
    let mdat = BoxType::Normal(*b"mdat");
    let mdat = BoxHeader {
        box_type: mdat,
        box_size: BoxSize::with_payload_size(mdat, data),
    };
    let mdat = mdat.encode_to_vec().map_err(failed)?;
    // The fields with the offsets of chunks have the same length for every value.
    let is_large = data > u64::from(u32::MAX / 2);
    let mut index = movie(contents, chunks, recipe)?;
    let set_places = |index: &mut MoovBox, data_at: u64| {
        let mut places = [Vec::new(), Vec::new()];
        let mut at = data_at;
        for chunk in chunks {
            places[usize::from(chunk.track == Track::Sound)].push(at);
            at += bytes_of(chunk);
        }
        for (track, places) in index.trak_boxes.iter_mut().zip(places) {
            track.mdia_box.minf_box.stbl_box.stco_or_co64_box = match is_large {
                false => Either::A(StcoBox {
                    chunk_offsets: places.iter().map(|&place| place as u32).collect(),
                }),
                true => Either::B(Co64Box {
                    chunk_offsets: places,
                }),
            };
        }
    };
    set_places(&mut index, 0);
    let bytes = index.encode_to_vec().map_err(failed)?.len();
    set_places(&mut index, (kind.len() + bytes + mdat.len()) as u64);
    let index = index.encode_to_vec().map_err(failed)?;
    Ok([kind, index, mdat].concat())
}

/// The index of the film; the offsets of its chunks are set later.
fn movie(contents: &Contents<'_>, chunks: &[Chunk], recipe: Option<&Recipe>) -> Result<MoovBox, FilmError> {
    let (format, samples) = (contents.format, contents.samples);
    let (timescale, frame_duration) = rate(format.frames_per_second);
    let frames_duration = samples.len() as u64 * u64::from(frame_duration);
    let unit = contents.sound.map_or(timescale, |sound| {
        common_unit(timescale, sound.format.samples_per_second)
    });
    let frames = Timed {
        timescale,
        duration: frames_duration,
    };
    let side = |pixels: u32| FixedPointNumber::new(pixels as i16, 0_u16);
    let mut film = track(
        FRAMES,
        frames.within(unit),
        frames_media(contents, chunks, &frames, frame_duration)?,
    );
    (film.tkhd_box.width, film.tkhd_box.height) = (side(format.width), side(format.height));
    let mut tracks = vec![film];
    if let Some(sound) = contents.sound {
        let heard = Timed {
            timescale: NonZeroU32::new(sound.format.samples_per_second).unwrap_or(NonZeroU32::MIN),
            duration: sound.format.samples,
        };
        let mut track = track(SOUND, heard.within(unit), sound_media(contents, sound, chunks));
        track.tkhd_box.volume = TkhdBox::DEFAULT_AUDIO_VOLUME;
        // What is decoded before the first sample and after the last is not heard.
        let edit = ElstEntry {
            edit_duration: heard.within(unit),
            media_time: sound.priming.into(),
            media_rate: FixedPointNumber::new(1, 0),
        };
        track.edts_box = Some(EdtsBox {
            elst_box: Some(ElstBox { entries: vec![edit] }),
            unknown_boxes: Vec::new(),
        });
        tracks.push(track);
    }
    Ok(MoovBox {
        mvhd_box: MvhdBox {
            creation_time: TIME,
            modification_time: TIME,
            timescale: unit,
            duration: tracks
                .iter()
                .map(|track| track.tkhd_box.duration)
                .max()
                .unwrap_or_default(),
            rate: MvhdBox::DEFAULT_RATE,
            volume: MvhdBox::DEFAULT_VOLUME,
            matrix: MvhdBox::DEFAULT_MATRIX,
            next_track_id: tracks.len() as u32 + 1,
        },
        trak_boxes: tracks,
        mvex_box: None,
        unknown_boxes: match recipe {
            Some(recipe) => vec![metadata(recipe)?],
            None => Vec::new(),
        },
    })
}

/// A length in units of a second.
#[derive(Clone, Copy)]
struct Timed {
    timescale: NonZeroU32,
    duration: u64,
}

impl Timed {
    /// The length in other units, to the nearest.
    fn within(&self, unit: NonZeroU32) -> u64 {
        let of = u128::from(self.timescale.get());
        ((u128::from(self.duration) * u128::from(unit.get()) + of / 2) / of) as u64
    }
}

/// Units of a second in which both a frame and a sample are whole; that of samples where there are none that fit.
fn common_unit(timescale: NonZeroU32, samples_per_second: u32) -> NonZeroU32 {
    let (mut a, mut b) = (timescale.get(), samples_per_second);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    let common = (timescale.get() / a).checked_mul(samples_per_second);
    NonZeroU32::new(common.unwrap_or(samples_per_second)).unwrap_or(timescale)
}

/// A track of this length, in units of the file.
fn track(id: u32, duration: u64, media: MdiaBox) -> TrakBox {
    TrakBox {
        tkhd_box: TkhdBox {
            flag_track_enabled: true,
            flag_track_in_movie: true,
            flag_track_in_preview: false,
            flag_track_size_is_aspect_ratio: false,
            creation_time: TIME,
            modification_time: TIME,
            track_id: id,
            duration,
            layer: TkhdBox::DEFAULT_LAYER,
            alternate_group: TkhdBox::DEFAULT_ALTERNATE_GROUP,
            volume: TkhdBox::DEFAULT_VIDEO_VOLUME,
            matrix: TkhdBox::DEFAULT_MATRIX,
            width: FixedPointNumber::new(0, 0),
            height: FixedPointNumber::new(0, 0),
        },
        edts_box: None,
        mdia_box: media,
        unknown_boxes: Vec::new(),
    }
}

fn frames_media(
    contents: &Contents<'_>,
    chunks: &[Chunk],
    frames: &Timed,
    frame_duration: u32,
) -> Result<MdiaBox, FilmError> {
    let samples = contents.samples;
    let numbers = (1..).filter_map(NonZeroU32::new).zip(samples);
    let keys = numbers.filter_map(|(number, sample)| sample.is_key.then_some(number));
    let durations = vec![SttsEntry {
        sample_count: samples.len() as u32,
        sample_delta: frame_duration,
    }];
    let description = description(contents.format, contents.sets)?;
    let mut index = table(
        description,
        durations,
        contents.sizes(Track::Frames),
        of(Track::Frames, chunks),
    );
    index.stss_box = Some(StssBox {
        sample_numbers: keys.collect(),
    });
    let header = Either::B(VmhdBox {
        graphicsmode: VmhdBox::DEFAULT_GRAPHICSMODE,
        opcolor: VmhdBox::DEFAULT_OPCOLOR,
    });
    Ok(media(*frames, HdlrBox::HANDLER_TYPE_VIDE, header, index))
}

fn sound_media(contents: &Contents<'_>, sound: &EncodedSound, chunks: &[Chunk]) -> MdiaBox {
    let format = &sound.format;
    // The last packet is as long as it is heard; players that know no edit lists end there too.
    let decoded = u64::from(sound.priming) + format.samples;
    let whole = decoded / u64::from(PACKET_SAMPLES);
    let durations = [
        (whole as u32, PACKET_SAMPLES),
        (1, (decoded % u64::from(PACKET_SAMPLES)) as u32),
    ];
    let durations = durations
        .into_iter()
        .filter(|(count, samples)| count * samples > 0);
    let durations = durations.map(|(sample_count, sample_delta)| SttsEntry {
        sample_count,
        sample_delta,
    });
    let description = sound_description(sound);
    let sizes = contents.sizes(Track::Sound);
    let index = table(description, durations.collect(), sizes, of(Track::Sound, chunks));
    let timed = Timed {
        timescale: NonZeroU32::new(format.samples_per_second).unwrap_or(NonZeroU32::MIN),
        duration: decoded,
    };
    let header = Either::A(SmhdBox {
        balance: SmhdBox::DEFAULT_BALANCE,
    });
    media(timed, HdlrBox::HANDLER_TYPE_SOUN, header, index)
}

/// The numbers of samples in the chunks of a track.
fn of(track: Track, chunks: &[Chunk]) -> impl Iterator<Item = u32> {
    let own = chunks.iter().filter(move |chunk| chunk.track == track);
    own.map(|chunk| chunk.samples.len() as u32)
}

/// The tables of a track: how long its samples are, how large, and in which chunks.
fn table(
    description: SampleEntry,
    durations: Vec<SttsEntry>,
    sizes: Vec<u32>,
    chunks: impl Iterator<Item = u32>,
) -> StblBox {
    let mut entries: Vec<StscEntry> = Vec::new();
    for (number, samples) in (1..).filter_map(NonZeroU32::new).zip(chunks) {
        if entries.last().is_none_or(|last| last.sample_per_chunk != samples) {
            entries.push(StscEntry {
                first_chunk: number,
                sample_per_chunk: samples,
                sample_description_index: NonZeroU32::MIN,
            });
        }
    }
    StblBox {
        stsd_box: StsdBox {
            entries: vec![description],
        },
        stts_box: SttsBox { entries: durations },
        ctts_box: None,
        cslg_box: None,
        stsc_box: StscBox { entries },
        stsz_box: StszBox::Variable { entry_sizes: sizes },
        stco_or_co64_box: Either::A(StcoBox {
            chunk_offsets: Vec::new(),
        }),
        stss_box: None,
        sdtp_box: None,
        unknown_boxes: Vec::new(),
    }
}

fn media(timed: Timed, handler: [u8; 4], header: Either<SmhdBox, VmhdBox>, index: StblBox) -> MdiaBox {
    MdiaBox {
        mdhd_box: MdhdBox {
            creation_time: TIME,
            modification_time: TIME,
            timescale: timed.timescale,
            duration: timed.duration,
            language: MdhdBox::LANGUAGE_UNDEFINED,
        },
        hdlr_box: HdlrBox {
            handler_type: handler,
            name: b"moored\0".to_vec(),
        },
        minf_box: MinfBox {
            smhd_or_vmhd_box: Some(header),
            dinf_box: DinfBox::LOCAL_FILE,
            stbl_box: index,
            unknown_boxes: Vec::new(),
        },
        unknown_boxes: Vec::new(),
    }
}

/// The description of the sound: AAC, in this rate and so many channels.
fn sound_description(sound: &EncodedSound) -> SampleEntry {
    let format = &sound.format;
    // The field has 16 bits: of higher rates the configuration alone tells.
    let rate = u16::try_from(format.samples_per_second).unwrap_or_default();
    SampleEntry::Mp4a(Mp4aBox {
        audio: AudioSampleEntryFields {
            data_reference_index: AudioSampleEntryFields::DEFAULT_DATA_REFERENCE_INDEX,
            channelcount: format.channels as u16,
            samplesize: AudioSampleEntryFields::DEFAULT_SAMPLESIZE,
            samplerate: FixedPointNumber::new(rate, 0),
        },
        esds_box: EsdsBox {
            es: EsDescriptor {
                es_id: EsDescriptor::MIN_ES_ID,
                stream_priority: EsDescriptor::LOWEST_STREAM_PRIORITY,
                depends_on_es_id: None,
                url_string: None,
                ocr_es_id: None,
                dec_config_descr: DecoderConfigDescriptor {
                    object_type_indication:
                        DecoderConfigDescriptor::OBJECT_TYPE_INDICATION_AUDIO_ISO_IEC_14496_3,
                    stream_type: DecoderConfigDescriptor::STREAM_TYPE_AUDIO,
                    up_stream: DecoderConfigDescriptor::UP_STREAM_FALSE,
                    buffer_size_db: Uint::new(0),
                    max_bitrate: 0, // unknown
                    avg_bitrate: sound.bits_per_second,
                    dec_specific_info: Some(DecoderSpecificInfo {
                        payload: sound.configuration.clone(),
                    }),
                },
                sl_config_descr: SlConfigDescriptor,
            },
        },
        unknown_boxes: Vec::new(),
    })
}

/// The description of the frames: H.264 in this size, in the colours of BT.709.
fn description(format: &FilmFormat, sets: &ParameterSets) -> Result<SampleEntry, FilmError> {
    // The profile, its constraints and the level follow the header of the sequence parameter set.
    let [_, profile, constraints, level, ..] = sets.sequence[..] else {
        return Err(FilmError::Container("no parameters".to_owned()));
    };
    // Primaries, transfer and matrix are those of BT.709; the range is limited (ISO/IEC 14496-12, 12.1.5).
    let colours = [&b"nclx"[..], &[0, 1, 0, 1, 0, 1, 0]].concat();
    Ok(SampleEntry::Avc1(Avc1Box {
        visual: VisualSampleEntryFields {
            data_reference_index: VisualSampleEntryFields::DEFAULT_DATA_REFERENCE_INDEX,
            width: format.width as u16,
            height: format.height as u16,
            horizresolution: VisualSampleEntryFields::DEFAULT_HORIZRESOLUTION,
            vertresolution: VisualSampleEntryFields::DEFAULT_VERTRESOLUTION,
            frame_count: VisualSampleEntryFields::DEFAULT_FRAME_COUNT,
            compressorname: VisualSampleEntryFields::NULL_COMPRESSORNAME,
            depth: VisualSampleEntryFields::DEFAULT_DEPTH,
        },
        avcc_box: AvccBox {
            avc_profile_indication: profile,
            profile_compatibility: constraints,
            avc_level_indication: level,
            length_size_minus_one: Uint::new(3),
            sps_list: vec![sets.sequence.clone()],
            pps_list: vec![sets.picture.clone()],
            chroma_format: None,
            bit_depth_luma_minus8: None,
            bit_depth_chroma_minus8: None,
            sps_ext_list: Vec::new(),
        },
        unknown_boxes: vec![opaque(b"colr", colours)],
    }))
}

/// Units of time a second, and how many of them a frame takes: exactly the rate, where it has a few digits or is one of
/// television's (24000/1001).
fn rate(frames_per_second: f32) -> (NonZeroU32, u32) {
    const FINEST: u32 = 100_000;
    let units = |frame_duration: u32| (f64::from(frames_per_second) * f64::from(frame_duration)).round();
    let is_exact = |duration: &u32| (units(*duration) / f64::from(*duration)) as f32 == frames_per_second;
    let duration = [1000, 1001].into_iter().find(is_exact).unwrap_or(FINEST);
    let timescale = NonZeroU32::new(units(duration) as u32);
    (timescale.unwrap_or(NonZeroU32::MIN), duration)
}

/// A box that cannot be written.
pub(super) fn failed(problem: shiguredo_mp4::Error) -> FilmError {
    FilmError::Container(format!("{:?}: {}", problem.kind, problem.reason))
}
