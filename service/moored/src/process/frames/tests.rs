use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes as Blob;
use engine::messages::{
    Answer, Command, Completed, Event, Failure, KeptBecause, ModelLocation, Order, Outcome, Progress,
    Shortage, StageMemory, StageWork, Standing, Ticket, Together, Work,
};
use gpu::{CardDescription, CardKind, MemoryProfile, ProfileName, Unloaded};
use pipelines::{
    Audio, Clip, Fp8Products, HostTensor, HostType, Image, InitImage, Int8Products, MediaFormat, Medium,
    Memo, Piece, Preset, Quantization, Request, Role, Rung, Sound, StagePlan, ValueShape, Values, Video,
};
use residency::{
    Bytes, Component, ComponentId, DriverTruth, HoldId, Holder, Ledger, Millis, Part, PinId, Policy,
    ReservationId, StageNeed, WaitCause,
};

use super::super::confinement::tries::{self, Tried};
use super::super::confinement::{Confinement, Held, Strictness};
use super::super::{Configuration, FromWorker, WorkerSettings};
use super::*;
use crate::edits::Changes;
use config::LogSettings;

fn component(name: &str) -> Component {
    Component {
        id: ComponentId::new(format!("{name}@1f")),
        name: name.to_owned(),
        bytes: Bytes::mib(300),
        reload_seconds: 0.1,
        parts: residency::Parts::default(),
    }
}

fn tensor(dtype: HostType) -> HostTensor {
    HostTensor {
        dtype,
        shape: vec![1, 2, 300],
        data: (0..=255).cycle().take(2400).collect(),
    }
}

fn values() -> Values {
    Values::from([
        ("pooled".to_owned(), tensor(HostType::Bf16)),
        ("sequence".to_owned(), tensor(HostType::F16)),
    ])
}

fn holder() -> Holder {
    Holder {
        name: "another program".to_owned(),
        pid: Some(4711),
        bytes: Bytes::gib(3),
    }
}

fn stage_memory() -> StageMemory {
    let before = Ledger::new(Bytes::gib(24), Bytes::mib(256)).summary();
    StageMemory {
        before,
        after: before,
        largest_block: Some(Bytes::gib(3)),
    }
}

pub(in crate::process) fn stage(medium: Medium) -> StageWork {
    StageWork {
        plan: StagePlan {
            name: "denoise".to_owned(),
            role: Role::Sample,
            components: vec!["transformer".to_owned(), "vae".to_owned()],
            rungs: vec![Rung {
                label: "whole".to_owned(),
                scratch: Bytes::gib(5),
                approximate: true,
                from_host: Vec::new(),
                copies: Vec::new(),
            }],
            shape: "1024x1024 t512".to_owned(),
            steps: 28,
            takes: vec![ValueShape::new("sequence", vec![1, 2, 300])],
            gives: vec!["latent".to_owned()],
            per_item: true,
            memo: Some(Memo::of(Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1))),
            section: None,
            shared: None,
            passes: model::Passes {
                in_step: 2,
                flops: 75_000_000_000_000.into(),
            },
            reads_media: true,
            preview: None,
        },
        components: vec![component("transformer"), component("vae")],
        later_stages: vec!["decode".to_owned()],
        later_request: Some(Request::of(Medium::Image(Image::of(48, 16)), 28, 3.5, 512)),
        later: vec![ComponentId::new("blake3:cd#vae@BF16")],
        request: Request {
            prompt: "Türme im Nebel, 霧".to_owned(),
            seed: u64::MAX,
            strength: 0.6,
            preview: true,
            from_values: true,
            ..Request::of(medium, 28, 3.5, 512)
        },
        values: values(),
        preview_interval_ms: 500,
    }
}

pub(in crate::process) fn media() -> [Medium; 3] {
    let image = InitImage {
        width: 32,
        height: 16,
        rgb: vec![77; 3 * 32 * 16].into(),
    };
    [
        Medium::Image(Image {
            width: 32,
            height: 16,
            init_image: Some(image.clone()),
            mask: None,
            references: Vec::new(),
            seen: Vec::new(),
            controls: Vec::new(),
        }),
        Medium::Video(Video {
            width: 32,
            height: 16,
            frames: 81,
            frames_per_second: 23.976,
            frames_at_a_time: 4,
            init_image: Some(image.clone()),
            end_image: Some(image),
            init_video: Some(Clip {
                format: MediaFormat::Video {
                    width: 2,
                    height: 1,
                    frames: 2,
                    frames_per_second: 8.0,
                    sound: None,
                },
                data: vec![7; 12].into(),
            }),
        }),
        Medium::Audio(Audio {
            seconds: 12.5,
            lyrics: "la".to_owned(),
            ..Audio::default()
        }),
    ]
}

pub(in crate::process) fn order(work: Work) -> Command {
    Command::Run(Box::new(Order {
        ticket: Ticket(300),
        job: "job-1".to_owned(),
        model: ModelLocation {
            key: "flux:transformer=int8".to_owned(),
            path: PathBuf::from("/models/flux 1"),
            quantization: Quantization::of(Preset::FourBit, [("vae", "fp8")]).unwrap(),
            adapters: Vec::new(),
            kept: vec![("transformer".to_owned(), PathBuf::from("/kept/1f.moored"))],
            identities: vec![(
                ComponentId::new("0a1b:f32"),
                ComponentId::new("path:/m#vae~5c@f32"),
            )],
        },
        work,
        policy: Policy::Exclusive,
        allow_low_memory: true,
        headroom: Bytes::gib(2),
        components: Vec::new(),
        sharing: Vec::new(),
        together: Some(Together { part: 1, of: 2 }),
        is_ahead: false,
    }))
}

fn commands() -> Vec<Command> {
    let ids = || vec![ComponentId::new("vae@1f"), ComponentId::new("clip@2e")];
    let stages = media().map(|medium| order(Work::Stage(Box::new(stage(medium)))));
    let others = vec![
        order(Work::Load(vec![component("vae")])),
        Command::Cancel(Ticket(u64::MAX)),
        Command::Taken {
            ticket: Ticket(7),
            bytes: Bytes::gib(3),
        },
        Command::Offer {
            ticket: Ticket(8),
            offer: vec![0, 255].into(),
        },
        Command::Standing(Standing {
            pins: vec![("flux".to_owned(), ids())],
            holds: vec![("hold-1".to_owned(), ids())],
            reservations: vec![("r-1".to_owned(), "a game".to_owned(), Bytes::gib(6))],
            foreign_before: Some(Bytes::gib(1)),
        }),
        Command::Unload {
            id: 1,
            components: ids(),
        },
        Command::Trim { id: 2 },
        Command::MakeRoom {
            id: 3,
            bytes: Bytes(u64::MAX),
        },
        Command::Shutdown,
    ];
    stages.into_iter().chain(others).collect()
}

/// A ledger with an entry of every kind.
fn ledger() -> Ledger {
    let (vae, clip, t5) = (component("vae"), component("clip"), component("t5"));
    let mut ledger = Ledger::new(Bytes::gib(24), Bytes::mib(512));
    for component in [&vae, &clip, &t5] {
        ledger.begin_load(component, Part::WHOLE, Millis(5)).unwrap();
        ledger.complete_load(&component.id, Millis(6)).unwrap();
    }
    let need = StageNeed {
        name: "decode".to_owned(),
        components: vec![vae.clone()],
        scratch: Bytes::gib(2),
        headroom: Bytes::ZERO,
        later: Vec::new(),
        model: Vec::new(),
        passes: u32::MAX,
    };
    ledger.lease(&need, Millis(7)).unwrap();
    ledger.pin(PinId::new("flux"), vec![vae.id.clone()]);
    ledger.hold(HoldId::new("hold-1"), vec![clip.id.clone()]);
    let label = "a game".to_owned();
    ledger.reserve(ReservationId::new("r-1"), label, Bytes::gib(6));
    ledger.reconcile(&DriverTruth {
        total: Bytes::gib(24),
        free: Bytes::gib(10),
        components: Bytes::mib(900),
        scratch: Bytes::gib(1),
        slack: Bytes::mib(100),
        workspaces: Bytes::mib(32),
        context: Bytes::mib(400),
        layout: None,
        holders: vec![holder()],
    });
    ledger.begin_evict(&t5.id).unwrap();
    ledger
}

fn completed(values: Values) -> Outcome {
    Outcome::Completed(Box::new(Completed {
        values,
        chunking: "strips of 16".to_owned(),
        approximate: true,
        passes_left_out: Some(model::PassesLeftOut { left_out: 3, of: 8 }),
        attention_in_fp8: true,
        resident_already: vec!["vae".to_owned()],
        move_ms: 1,
        run_ms: 2,
        room: Bytes(3),
        predicted_scratch: Bytes(4),
        peak_scratch: Bytes(5),
        peak_bytes: Bytes(6),
        memory: Some(stage_memory()),
        attention: "cudnn 9.19.0, own kernels".to_owned(),
        load_seconds: vec![(ComponentId::new("vae@1"), 0.1)],
    }))
}

fn outcomes() -> Vec<Outcome> {
    let cause = [
        WaitCause::LateEviction,
        WaitCause::Leases,
        WaitCause::Foreign,
        WaitCause::Reservation,
    ];
    let waits = cause.map(|cause| {
        Outcome::Wait(Shortage {
            short: Bytes(1),
            needed: Bytes(2),
            usable: Bytes(3),
            cause,
            holders: vec![holder()],
        })
    });
    let failures = [
        Failure::OutOfMemory {
            stage: "decode".to_owned(),
            needed: Bytes(1),
            usable: Bytes(2),
            holders: vec![holder()],
        },
        Failure::NotFinite {
            component: "transformer".to_owned(),
            step: 4,
        },
        Failure::Model {
            message: "the file is cut off".to_owned(),
        },
        Failure::Replaced {
            message: "the files of its vae were replaced".to_owned(),
        },
        Failure::BadInput("a latent of another model".to_owned()),
        Failure::Internal("what nobody thought of".to_owned()),
    ];
    let mut outcomes = vec![
        completed(Values::new()),
        completed(values()),
        Outcome::Never {
            needed: Bytes(1),
            capacity: Bytes(2),
        },
        Outcome::Cancelled,
    ];
    outcomes.extend(waits);
    outcomes.extend(failures.map(Outcome::Failed));
    outcomes
}

fn progress() -> Vec<Progress> {
    vec![
        Progress::Evicting(component("vae")),
        Progress::Loading {
            component: component("vae"),
            done: Bytes::mib(17),
        },
        Progress::Started {
            chunking: "whole".to_owned(),
            memory: stage_memory().before,
        },
        Progress::Step { n: 3, of: 28 },
        Progress::Preview {
            step: 3,
            width: 2,
            height: 2,
            rgb: vec![9; 12].into(),
        },
        Progress::Piece(Piece::image(2, 1, vec![1, 2, 3, 4, 5, 6])),
        Progress::Piece(Piece {
            track: "drums".to_owned(),
            format: MediaFormat::Audio {
                samples_per_second: 48_000,
                channels: 2,
                samples: 3,
            },
            first: 1,
            data: vec![1; 8].into(),
        }),
        Progress::Piece(Piece {
            track: String::new(),
            format: MediaFormat::Video {
                width: 2,
                height: 1,
                frames: 2,
                frames_per_second: 23.976,
                sound: Some(Sound {
                    samples_per_second: 16_000,
                    channels: 1,
                    samples: 1335,
                }),
            },
            first: 1,
            data: vec![5; 6].into(),
        }),
        Progress::Retrying {
            reason: "out_of_memory".to_owned(),
            message: "in strips of 16".to_owned(),
        },
    ]
}

fn from_worker() -> Vec<FromWorker> {
    let ticket = Ticket(7);
    let finished = |outcome| Event::Finished { ticket, outcome };
    let answers = [
        Answer::Unloaded {
            freed: vec![(
                component("vae"),
                Unloaded {
                    booked: Bytes(4),
                    freed: Bytes(3),
                },
            )],
            kept: vec![
                (component("clip"), KeptBecause::Pinned),
                (component("t5"), KeptBecause::Held(Some("me".to_owned()))),
                (component("vae"), KeptBecause::Shared("a+full".to_owned())),
            ],
            short: Bytes(1),
        },
        Answer::Trimmed(Bytes::mib(100)),
        Answer::Failed("the card is busy".to_owned()),
    ];
    let mut events = vec![
        Event::Ready {
            card: CardDescription {
                id: "GPU-1a".to_owned(),
                kind: CardKind::Cuda,
                name: "a device".to_owned(),
                total: Bytes::gib(80),
                compute_capability: Some((9, 0)),
                compute_dtype: "bf16".to_owned(),
                peers: gpu::Peers::Only(["GPU-2b".to_owned()].into()),
            },
            attention: "own kernels: libcudnn.so.9 cannot be loaded".to_owned(),
            speeds: gpu::CardSpeeds {
                link: Some(Bytes(24_000_000_000)),
                flops: Some(150_000_000_000_000),
            },
            ledger: Arc::new(ledger()),
        },
        Event::Snapshot(Arc::new(ledger())),
        Event::Offer {
            ticket,
            offer: vec![1, 0].into(),
        },
    ];
    events.extend(
        progress()
            .into_iter()
            .map(|progress| Event::Progress { ticket, progress }),
    );
    events.extend(outcomes().into_iter().map(finished));
    events.extend(answers.map(|answer| Event::Answer { id: 5, answer }));
    let tried = |what: &str, outcome| Tried {
        what: what.to_owned(),
        outcome,
    };
    let mut messages = vec![
        FromWorker::Refused("its card is held by process 12".to_owned()),
        FromWorker::Confined(Held {
            landlock: Some(7),
            places: 3,
            denies_calls: true,
            lacks: vec!["a part".to_owned()],
        }),
        FromWorker::Tried(vec![
            tried("a file", tries::Outcome::Refused),
            tried("a socket", tries::Outcome::Succeeded),
            tried("a program", tries::Outcome::Failed("it is not there".to_owned())),
        ]),
    ];
    messages.extend(events.into_iter().map(FromWorker::Event));
    messages
}

fn configurations() -> [Configuration; 2] {
    let settings = |device: &str, lock_file: Option<&str>| WorkerSettings {
        device: device.parse().unwrap(),
        headroom: Bytes::mib(512),
        host_memory: Some(Bytes::gib(32)),
        memory: MemoryProfile::of(ProfileName::Balanced, Bytes::gib(24)),
        log: LogSettings {
            otlp: None,
            filter: Some("json:info,gpu=debug".to_owned()),
            json: false,
        },
        lock_file: lock_file.map(PathBuf::from),
        plans_folder: PathBuf::from("/state/plans"),
        fp8_products: Fp8Products::Always,
        int8_products: Int8Products::Never,
        confinement: Confinement {
            strictness: Strictness::All,
            is_required: true,
            drives_nvidia: false,
            read: vec![PathBuf::from("/models")],
            write: vec![PathBuf::from("/state/plans")],
            never: vec![PathBuf::from("/state")],
            service: "127.0.0.1:50051".parse().unwrap(),
        },
    };
    [
        Configuration {
            generation: 1,
            settings: settings("cuda:GPU-8f2c", Some("/state/GPU-8f2c.worker")),
            is_trial: false,
        },
        Configuration {
            generation: 2,
            settings: settings("sim:24GiB", None),
            is_trial: true,
        },
    ]
}

fn frame_of(message: &impl Serialize) -> Vec<u8> {
    let mut frame = Vec::new();
    write(message, &mut frame).unwrap();
    frame
}

/// Writes all messages one after the other, and reads them as a worker does and as a supervisor does.
fn arrive_as_they_were<M: Serialize + DeserializeOwned + PartialEq + Debug>(messages: &[M]) {
    let pipe: Vec<u8> = messages.iter().flat_map(frame_of).collect();
    let (mut blocking, mut buffer) = (&pipe[..], BytesMut::from(&pipe[..]));
    let mut frames = Frames::<M>::new();
    for message in messages {
        assert_eq!(&read::<M>(&mut blocking).unwrap().unwrap(), message);
        assert_eq!(&frames.decode(&mut buffer).unwrap().unwrap(), message);
    }
    assert!(read::<M>(&mut blocking).unwrap().is_none());
    assert!(frames.decode_eof(&mut buffer).unwrap().is_none());
}

#[test]
fn every_message_is_read_as_it_was_written() {
    arrive_as_they_were(&configurations());
    arrive_as_they_were(&commands());
    arrive_as_they_were(&from_worker());
}

#[test]
fn a_blob_is_written_to_the_pipe_without_a_copy() {
    /// Address and length of each piece that was written.
    struct Pieces(Vec<(*const u8, usize)>);
    impl io::Write for Pieces {
        fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
            self.0.push((piece.as_ptr(), piece.len()));
            Ok(piece.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let rgb = Blob::from(vec![9; 3 * 512 * 512]);
    let preview = Progress::Preview {
        step: 1,
        width: 512,
        height: 512,
        rgb: rgb.clone(),
    };
    let mut pieces = Pieces(Vec::new());
    write(&preview, &mut pieces).unwrap();
    assert!(pieces.0.contains(&(rgb.as_ptr(), rgb.len())));
}

#[test]
fn a_frame_that_is_cut_off_is_an_error() {
    for message in from_worker() {
        let frame = frame_of(&message);
        for length in 1..frame.len() {
            let cut = &frame[..length];
            assert!(matches!(
                read::<FromWorker>(&mut &*cut),
                Err(FrameError::Pipe(problem)) if problem.kind() == io::ErrorKind::UnexpectedEof
            ));
            let (mut buffer, mut frames) = (BytesMut::from(cut), Frames::<FromWorker>::new());
            assert!(frames.decode(&mut buffer).unwrap().is_none());
            assert!(matches!(frames.decode_eof(&mut buffer), Err(FrameError::Pipe(_))));
        }
    }
}

#[test]
fn a_frame_that_is_too_large_is_neither_read_nor_written() {
    let too_large = (LONGEST_FRAME_BYTES as u32 + 1).to_be_bytes();
    assert!(matches!(
        read::<Command>(&mut &too_large[..]),
        Err(FrameError::TooLarge(_))
    ));
    let mut buffer = BytesMut::from(&too_large[..]);
    assert!(matches!(
        Frames::<FromWorker>::new().decode(&mut buffer),
        Err(FrameError::TooLarge(_))
    ));

    let preview = Progress::Preview {
        step: 1,
        width: 1,
        height: 1,
        rgb: vec![0; LONGEST_FRAME_BYTES].into(), // never touched, so that no memory is committed
    };
    let mut pipe = Vec::new();
    assert!(matches!(
        write(&preview, &mut pipe),
        Err(FrameError::TooLarge(bytes)) if bytes > LONGEST_FRAME_BYTES
    ));
    assert!(pipe.is_empty());
}

/// A frame with these bytes after its length.
fn framed(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

#[test]
fn garbage_is_an_error() {
    for garbage in [
        &[][..],
        &[200, 1],
        &[255; 64],
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ] {
        let frame = framed(garbage);
        assert!(matches!(
            read::<Command>(&mut &frame[..]),
            Err(FrameError::Malformed(_))
        ));
        assert!(matches!(
            Frames::<FromWorker>::new().decode(&mut BytesMut::from(&frame[..])),
            Err(FrameError::Malformed(_))
        ));
    }
    let mut shutdown = frame_of(&Command::Shutdown).split_off(4);
    shutdown.push(0);
    assert!(matches!(
        read::<Command>(&mut &framed(&shutdown)[..]),
        Err(FrameError::Surplus(1))
    ));
}

/// For any bytes of a frame: a message that is read from them is written unchanged.
#[test]
fn any_frame_is_read_safely() {
    fn check_frame<M: Serialize + DeserializeOwned>(frame: &[u8]) {
        let blocking = read::<M>(&mut &*frame);
        let asynchronous = Frames::<M>::new().decode(&mut BytesMut::from(frame));
        if let Ok(Some(message)) = blocking {
            let written = frame_of(&message);
            assert!(asynchronous.is_ok_and(|same| same.is_some_and(|same| frame_of(&same) == written)));
            let again = read::<M>(&mut &written[..]).unwrap().unwrap();
            assert_eq!(frame_of(&again), written);
        }
    }
    // Without the length, which is computed from the remaining bytes.
    let frames = |messages: Vec<Vec<u8>>| -> Vec<Vec<u8>> {
        messages
            .into_iter()
            .map(|mut frame| frame.split_off(LENGTH_BYTES))
            .collect()
    };
    let commands = frames(commands().iter().map(frame_of).collect());
    let events = frames(from_worker().iter().map(frame_of).collect());
    let configurations = frames(configurations().iter().map(frame_of).collect());
    bolero::check!()
        .with_iterations(5000)
        .with_max_len(Changes::MAX_LEN)
        .with_type::<Changes>()
        .for_each(|changes| {
            check_frame::<Command>(&framed(&changes.of(&commands)));
            check_frame::<FromWorker>(&framed(&changes.of(&events)));
            check_frame::<Configuration>(&framed(&changes.of(&configurations)));
        });
}
