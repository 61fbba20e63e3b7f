//! The MP4 file around encoded frames (ISO/IEC 14496-12 and -15), and the recipe in its metadata.

use std::num::NonZeroU32;

use shiguredo_mp4::boxes::{
    Avc1Box, AvccBox, Brand, Co64Box, DinfBox, FtypBox, HdlrBox, MdhdBox, MdiaBox, MinfBox, MoovBox, MvhdBox,
    SampleEntry, StblBox, StcoBox, StscBox, StscEntry, StsdBox, StssBox, StszBox, SttsBox, SttsEntry,
    TkhdBox, TrakBox, UnknownBox, VisualSampleEntryFields, VmhdBox,
};
use shiguredo_mp4::{BoxHeader, BoxSize, BoxType, Either, Encode as _, FixedPointNumber, Mp4FileTime, Uint};

use super::h264::ParameterSets;
use super::{FilmError, FilmFormat, Sample};
use crate::Recipe;

/// The name of the only track.
const TRACK: u32 = 1;
/// Metadata in the form of iTunes: the comment of a film, and the program that wrote it, as other tools show them.
const COMMENT: &[u8; 4] = b"\xa9cmt";
const TOOL: &[u8; 4] = b"\xa9too";
/// Path of the boxes that contain them.
const METADATA: [&[u8; 4]; 4] = [b"moov", b"udta", b"meta", b"ilst"];
/// Type of a value in metadata: UTF-8.
const TEXT: u32 = 1;

/// Whether this is the start of an MP4 file.
pub fn is_mp4(file: &[u8]) -> bool {
    file.get(4..8) == Some(b"ftyp")
}

/// Everything before the frames: the type of the file, its index, and the header of the frames, which follow in order.
pub(super) fn head(
    format: &FilmFormat,
    sets: &ParameterSets,
    samples: &[Sample],
    recipe: Option<&Recipe>,
) -> Result<Vec<u8>, FilmError> {
    let brands = [Brand::ISOM, Brand::ISO2, Brand::AVC1, Brand::MP41];
    let kind = FtypBox {
        major_brand: Brand::ISOM,
        minor_version: 512,
        compatible_brands: brands.to_vec(),
    };
    let kind = kind.encode_to_vec().map_err(failed)?;
    let frames: u64 = samples.iter().map(|sample| sample.data.len() as u64).sum();
    let mdat = BoxType::Normal(*b"mdat");
    let mdat = BoxHeader {
        box_type: mdat,
        box_size: BoxSize::with_payload_size(mdat, frames),
    };
    let mdat = mdat.encode_to_vec().map_err(failed)?;
    // The field with the offset of the frames has the same length for every value.
    let is_large = frames > u64::from(u32::MAX / 2);
    let mut index = movie(format, sets, samples, recipe)?;
    let place = |place: u64| match u32::try_from(place) {
        Ok(small) if !is_large => Either::A(StcoBox {
            chunk_offsets: vec![small],
        }),
        _ => Either::B(Co64Box {
            chunk_offsets: vec![place],
        }),
    };
    let set_place = |index: &mut MoovBox, at: u64| {
        for track in &mut index.trak_boxes {
            track.mdia_box.minf_box.stbl_box.stco_or_co64_box = place(at);
        }
    };
    set_place(&mut index, 0);
    let bytes = index.encode_to_vec().map_err(failed)?.len();
    set_place(&mut index, (kind.len() + bytes + mdat.len()) as u64);
    let index = index.encode_to_vec().map_err(failed)?;
    Ok([kind, index, mdat].concat())
}

/// The index of the film; the offset of its frames is set later.
fn movie(
    format: &FilmFormat,
    sets: &ParameterSets,
    samples: &[Sample],
    recipe: Option<&Recipe>,
) -> Result<MoovBox, FilmError> {
    let (timescale, frame_duration) = rate(format.frames_per_second);
    let duration = samples.len() as u64 * u64::from(frame_duration);
    let media = media(format, sets, samples, timescale, frame_duration)?;
    let time = Mp4FileTime::default(); // the same film is the same file
    let side = |pixels: u32| FixedPointNumber::new(pixels as i16, 0_u16);
    let track = TrakBox {
        tkhd_box: TkhdBox {
            flag_track_enabled: true,
            flag_track_in_movie: true,
            flag_track_in_preview: false,
            flag_track_size_is_aspect_ratio: false,
            creation_time: time,
            modification_time: time,
            track_id: TRACK,
            duration,
            layer: TkhdBox::DEFAULT_LAYER,
            alternate_group: TkhdBox::DEFAULT_ALTERNATE_GROUP,
            volume: TkhdBox::DEFAULT_VIDEO_VOLUME,
            matrix: TkhdBox::DEFAULT_MATRIX,
            width: side(format.width),
            height: side(format.height),
        },
        edts_box: None,
        mdia_box: media,
        unknown_boxes: Vec::new(),
    };
    Ok(MoovBox {
        mvhd_box: MvhdBox {
            creation_time: time,
            modification_time: time,
            timescale,
            duration,
            rate: MvhdBox::DEFAULT_RATE,
            volume: MvhdBox::DEFAULT_VOLUME,
            matrix: MvhdBox::DEFAULT_MATRIX,
            next_track_id: TRACK + 1,
        },
        trak_boxes: vec![track],
        mvex_box: None,
        unknown_boxes: match recipe {
            Some(recipe) => vec![metadata(recipe)?],
            None => Vec::new(),
        },
    })
}

fn media(
    format: &FilmFormat,
    sets: &ParameterSets,
    samples: &[Sample],
    timescale: NonZeroU32,
    frame_duration: u32,
) -> Result<MdiaBox, FilmError> {
    let count = samples.len() as u32;
    let numbers = (1..).filter_map(NonZeroU32::new).zip(samples);
    let keys = numbers.filter_map(|(number, sample)| sample.is_key.then_some(number));
    let index = StblBox {
        stsd_box: StsdBox {
            entries: vec![description(format, sets)?],
        },
        stts_box: SttsBox {
            entries: vec![SttsEntry {
                sample_count: count,
                sample_delta: frame_duration,
            }],
        },
        ctts_box: None,
        cslg_box: None,
        stsc_box: StscBox {
            entries: vec![StscEntry {
                first_chunk: NonZeroU32::MIN,
                sample_per_chunk: count,
                sample_description_index: NonZeroU32::MIN,
            }],
        },
        stsz_box: StszBox::Variable {
            entry_sizes: samples.iter().map(|sample| sample.data.len() as u32).collect(),
        },
        stco_or_co64_box: Either::A(StcoBox {
            chunk_offsets: Vec::new(),
        }),
        stss_box: Some(StssBox {
            sample_numbers: keys.collect(),
        }),
        sdtp_box: None,
        unknown_boxes: Vec::new(),
    };
    Ok(MdiaBox {
        mdhd_box: MdhdBox {
            creation_time: Mp4FileTime::default(),
            modification_time: Mp4FileTime::default(),
            timescale,
            duration: samples.len() as u64 * u64::from(frame_duration),
            language: MdhdBox::LANGUAGE_UNDEFINED,
        },
        hdlr_box: HdlrBox {
            handler_type: HdlrBox::HANDLER_TYPE_VIDE,
            name: b"moored\0".to_vec(),
        },
        minf_box: MinfBox {
            smhd_or_vmhd_box: Some(Either::B(VmhdBox {
                graphicsmode: VmhdBox::DEFAULT_GRAPHICSMODE,
                opcolor: VmhdBox::DEFAULT_OPCOLOR,
            })),
            dinf_box: DinfBox::LOCAL_FILE,
            stbl_box: index,
            unknown_boxes: Vec::new(),
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

/// A box of a type that the library does not know.
fn opaque(kind: &[u8; 4], payload: Vec<u8>) -> UnknownBox {
    let box_type = BoxType::Normal(*kind);
    UnknownBox {
        box_type,
        box_size: BoxSize::with_payload_size(box_type, payload.len() as u64),
        payload,
    }
}

/// The metadata of a film: its recipe as JSON, and the program that made it.
fn metadata(recipe: &Recipe) -> Result<UnknownBox, FilmError> {
    let bytes = |kind: &[u8; 4], payload: Vec<u8>| opaque(kind, payload).encode_to_vec().map_err(failed);
    let text = |kind: &[u8; 4], text: &str| {
        // The type of the value, and a locale that is open.
        let value = [&TEXT.to_be_bytes()[..], &[0; 4], text.as_bytes()].concat();
        bytes(kind, bytes(b"data", value)?)
    };
    let json = serde_json::to_string(recipe).map_err(|problem| FilmError::Container(problem.to_string()))?;
    let items = [
        text(COMMENT, &json)?,
        text(TOOL, &format!("moored {}", recipe.version))?,
    ];
    // Version and flags; then the handler: iTunes' metadata.
    let handler = [&[0; 8][..], b"mdirappl", &[0; 9]].concat();
    let meta = [
        vec![0; 4],
        bytes(b"hdlr", handler)?,
        bytes(b"ilst", items.concat())?,
    ];
    Ok(opaque(b"udta", bytes(b"meta", meta.concat())?))
}

/// The recipe in the metadata of a film; `None` where it has none.
pub fn recipe_of(file: &[u8]) -> Option<&str> {
    let inside = METADATA.iter().try_fold(file, |content, kind| {
        let inside = find(content, kind)?;
        // Metadata has a version and flags in front.
        if *kind == b"meta" {
            inside.get(4..)
        } else {
            Some(inside)
        }
    })?;
    let value = find(find(inside, COMMENT)?, b"data")?;
    std::str::from_utf8(value.get(8..)?).ok()
}

/// The payload of the first box of a kind among boxes.
fn find<'a>(mut boxes: &'a [u8], kind: &[u8; 4]) -> Option<&'a [u8]> {
    while !boxes.is_empty() {
        let (header, payload) = BoxHeader::decode_header_and_payload(boxes).ok()?;
        if header.box_type == BoxType::Normal(*kind) {
            return Some(payload);
        }
        boxes = boxes.get(header.external_size() + payload.len()..)?;
    }
    None
}

fn failed(problem: shiguredo_mp4::Error) -> FilmError {
    FilmError::Container(format!("{:?}: {}", problem.kind, problem.reason))
}
