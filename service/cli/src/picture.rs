//! The cards as they are, drawn to scale: a bar for each card, with a row under it for each user of its memory.

use api::v1;
use console::{Style, measure_text_width, pad_str, truncate_str};
use residency::Bytes;

use crate::names::short_key;
use crate::total_of;

/// Bounds of the width of a drawing, in characters.
const NARROWEST: usize = 60;
const WIDEST: usize = 140;
/// Characters of a line where there is no terminal.
const PIPE_WIDTH: usize = 100;
/// Characters across the bar of one row.
const ROW_BAR: usize = 24;
/// Characters for names, before they are cut.
const LONGEST_NAME: usize = 34;
/// Parts of a character that a row's bar may end with, in eighths.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
/// Terminal colours (of 256) of components, one after the other: neighbours differ for the colour-blind too.
const COMPONENT_COLOURS: [u8; 8] = [39, 214, 43, 177, 112, 205, 75, 222];
/// Terminal colours of other programs.
const FOREIGN_COLOURS: [u8; 3] = [203, 167, 131];

/// Properties of the output.
#[derive(Clone, Copy, Debug)]
pub(super) struct Canvas {
    width: usize,
    colour: bool,
    /// Whether lines are cut at the width; they are not in a pipe.
    cuts: bool,
}

impl Canvas {
    /// Properties of standard output: no colours with `NO_COLOR`, or where the terminal has none.
    pub(super) fn of_stdout() -> Canvas {
        let terminal = console::Term::stdout();
        let width = terminal
            .size_checked()
            .map_or(PIPE_WIDTH, |(_, columns)| usize::from(columns));
        Canvas {
            width: width.clamp(NARROWEST, WIDEST),
            colour: terminal.is_term() && console::colors_enabled(),
            cuts: terminal.is_term(),
        }
    }

    /// Text in one of 256 colours, or as it is.
    fn coloured(self, text: &str, colour: u8) -> String {
        if self.colour {
            Style::new()
                .color256(colour)
                .force_styling(true)
                .apply_to(text)
                .to_string()
        } else {
            text.to_owned()
        }
    }

    fn dim(self, text: &str) -> String {
        self.coloured(text, 245)
    }

    fn bold(self, text: &str) -> String {
        if self.colour {
            Style::new().bold().force_styling(true).apply_to(text).to_string()
        } else {
            text.to_owned()
        }
    }

    /// A line that does not wrap.
    fn fit(self, line: &str) -> String {
        let width = if self.cuts { self.width } else { usize::MAX };
        truncate_str(line.trim_end(), width, "…").into_owned()
    }
}

/// One user of memory on a card.
struct MemoryUser {
    /// Its character in the card's bar, without colours and with them.
    letter: char,
    mark: char,
    colour: u8,
    name: String,
    bytes: u64,
    /// Details after its size: states, and the keys of its entries.
    notes: Vec<String>,
}

/// The status as lines of text.
pub(super) fn picture(status: &v1::Status, canvas: Canvas) -> String {
    let mut lines = Vec::new();
    for card in &status.cards {
        let job = status
            .jobs
            .iter()
            .find(|job| !card.job_id.is_empty() && job.id == card.job_id);
        lines.extend(card_lines(card, job, canvas));
        lines.push(String::new());
    }
    let shown_above = |job: &&v1::JobInfo| status.cards.iter().any(|card| card.job_id == job.id);
    let mut others = status.jobs.iter().filter(|job| !shown_above(job)).peekable();
    if status.jobs.is_empty() {
        lines.push("no jobs".to_owned());
    } else if others.peek().is_some() {
        lines.extend(others.map(|job| canvas.fit(&job_line(job))));
    }
    lines.push(format!(
        "latents {} ({}), text encodings {} ({})",
        status.latents,
        Bytes(status.latent_bytes),
        status.text_encodings,
        Bytes(status.text_encoding_bytes)
    ));
    let lines: Vec<_> = lines.iter().map(|line| wording::drawn_line(line)).collect();
    lines.join("\n")
}

fn card_lines(card: &v1::CardStatus, job: Option<&v1::JobInfo>, canvas: Canvas) -> Vec<String> {
    let memory = card.memory.unwrap_or_default();
    let mut facts = vec![card.state.clone(), card.policy.clone()];
    if card.worker_pid > 0 {
        facts.push(format!("worker {}", card.worker_pid));
    }
    match card.worker_restarts {
        0 => {}
        1 => facts.push("restarted once".to_owned()),
        times => facts.push(format!("restarted {times} times")),
    }
    let mut lines = vec![canvas.fit(&format!(
        "{}  {}  {}",
        canvas.bold(&card.id),
        card.name,
        canvas.dim(&facts.join(", "))
    ))];
    let parts = parts(card, &memory);
    lines.push(card_bar(&parts, memory.total, canvas));
    lines.push(canvas.fit(&format!(
        "{} in all, {} usable",
        Bytes(memory.total),
        canvas.bold(&Bytes(memory.usable).to_string())
    )));
    if let Some(note) = host_note(card) {
        lines.push(canvas.fit(&note));
    }
    if !card.attention.is_empty() {
        lines.push(canvas.fit(&format!("attention: {}", card.attention)));
    }
    let name_width = parts
        .iter()
        .map(|part| measure_text_width(&part.name))
        .max()
        .unwrap_or(0)
        .min(LONGEST_NAME);
    for part in &parts {
        lines.push(canvas.fit(&row(part, memory.total, name_width, canvas)));
    }
    for reservation in &card.reservations {
        let process = match reservation.process_id {
            0 => String::new(),
            id => format!(" (process {id})"),
        };
        let label = match reservation.label.is_empty() {
            true => String::new(),
            false => format!(" for {}", reservation.label),
        };
        lines.push(canvas.fit(&format!(
            "    kept free{label}{process}: {}, {} left; moored release {}",
            Bytes(reservation.bytes),
            seconds(reservation.expires_in_ms),
            reservation.id
        )));
    }
    if let Some(job) = job {
        lines.push(canvas.fit(&running_line(job, canvas)));
    }
    lines
}

/// The users of memory, in the order of the bar.
fn parts(card: &v1::CardStatus, memory: &v1::MemoryAccounts) -> Vec<MemoryUser> {
    let mut parts: Vec<MemoryUser> = Vec::new();
    let mut unseen = memory.components;
    for (index, resident) in card.residents.iter().enumerate() {
        let component = resident.component.clone().unwrap_or_default();
        let bytes = resident
            .streamed
            .as_ref()
            .map_or(component.bytes, |part| part.resident_bytes);
        // Bytes of components that are still being loaded or unloaded remain.
        unseen = unseen.saturating_sub(bytes);
        parts.push(MemoryUser {
            letter: char::from(b'A' + u8::try_from(index % 26).unwrap_or(0)),
            mark: '█',
            colour: COMPONENT_COLOURS[index % COMPONENT_COLOURS.len()],
            name: component.name,
            bytes,
            notes: resident_notes(resident),
        });
    }
    let account = |letter, mark, colour, name: &str, bytes, note: &str| MemoryUser {
        letter,
        mark,
        colour,
        name: name.to_owned(),
        bytes,
        notes: vec![note.to_owned()],
    };
    parts.extend([
        account('#', '█', 250, "other components", unseen, "being moved"),
        account(
            '%',
            '▓',
            231,
            "scratch",
            memory.scratch,
            "activations of the stage that runs",
        ),
        account('=', '▒', 250, "slack", memory.slack, "ours, unused"),
        account('w', '▓', 66, "workspaces", memory.workspaces, "of libraries"),
        account(
            'c',
            '▓',
            103,
            "context",
            memory.context,
            "of the worker process itself",
        ),
    ]);
    parts.extend(foreign_parts(card, memory.foreign));
    parts.extend([
        account(
            '?',
            '▒',
            227,
            "unexplained",
            memory.unexplained,
            "freed, and not shown as free yet",
        ),
        account('.', '·', 240, "free", memory.free, ""),
    ]);
    parts.retain(|part| part.bytes > 0);
    parts
}

/// Memory of other programs. They are the first holders of a card; the holders after them are ours.
fn foreign_parts(card: &v1::CardStatus, foreign: u64) -> Vec<MemoryUser> {
    let mut left = foreign;
    let mut parts = Vec::new();
    for holder in &card.holders {
        let bytes = holder.bytes.min(left);
        if bytes == 0 {
            break;
        }
        left -= bytes;
        let index = parts.len();
        parts.push(MemoryUser {
            letter: ['x', 'y', 'z'][index % 3],
            mark: '▚',
            colour: FOREIGN_COLOURS[index % FOREIGN_COLOURS.len()],
            name: holder.name.clone(),
            bytes,
            notes: vec![match holder.pid {
                0 => "foreign".to_owned(),
                pid => format!("foreign, pid {pid}"),
            }],
        });
    }
    parts
}

/// `12.3 GiB of the machine's memory: transformer 11.2, text_encoder_2 1.1 (left the card)`, if components hold any.
fn host_note(card: &v1::CardStatus) -> Option<String> {
    let on_card = |held: &v1::HostComponent| {
        let mut residents = card.residents.iter();
        residents.any(|resident| {
            resident.component.as_ref().map(|c| &c.id) == held.component.as_ref().map(|c| &c.id)
        })
    };
    let all: Bytes = card.on_host.iter().map(|held| Bytes(held.bytes)).sum();
    let each = card.on_host.iter().map(|held| {
        let name = held.component.as_ref().map_or("", |component| &component.name);
        let left = if on_card(held) { "" } else { ", for its next use" };
        format!("{name} {}{left}", Bytes(held.bytes))
    });
    let limit = match card.host_limit_bytes {
        0 => String::new(),
        limit => format!(" of at most {}", Bytes(limit)),
    };
    let each: Vec<String> = each.collect();
    (all > Bytes::ZERO).then(|| format!("machine's memory: {all}{limit} ({})", each.join("; ")))
}

fn resident_notes(resident: &v1::ResidentComponent) -> Vec<String> {
    let mut notes = Vec::new();
    if resident.state != "resident" {
        notes.push(resident.state.clone());
    }
    if resident.leases > 0 {
        notes.push("in use".to_owned());
    } else if resident.state == "resident" {
        notes.push(format!("idle {}", seconds(resident.idle_ms)));
    }
    if let Some(part) = &resident.streamed {
        notes.push(wording::one_line(&part.words).into_owned());
    }
    if resident.pinned {
        notes.push("pinned".to_owned());
    }
    if resident.held {
        notes.push("held".to_owned());
    }
    let entries: Vec<String> = resident.entries.iter().map(|key| short_key(key)).collect();
    notes.push(entries.join(" "));
    notes
}

/// The card's bar, as wide as the canvas, in which each part has at least one character.
fn card_bar(parts: &[MemoryUser], total: u64, canvas: Canvas) -> String {
    let bytes: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
    let mut bar = String::new();
    for (part, width) in parts.iter().zip(widths(&bytes, total, canvas.width)) {
        let mark = if canvas.colour { part.mark } else { part.letter };
        bar.push_str(&canvas.coloured(&mark.to_string().repeat(width), part.colour));
    }
    bar
}

/// Characters for each share of `total`, `width` together (fewer if the shares are less than it): in proportion, but
/// at least one for each share above 0, at the cost of the widest.
fn widths(bytes: &[u64], total: u64, width: usize) -> Vec<usize> {
    let total = u128::from(total.max(total_of(bytes.iter().copied())).max(1));
    // Boundaries are rounded, not widths, so that errors do not add up.
    let mut sum = 0_u128;
    let mut edge = 0;
    let mut widths: Vec<usize> = Vec::with_capacity(bytes.len());
    for &each in bytes {
        sum += u128::from(each);
        let next = usize::try_from((sum * width as u128 + total / 2) / total).unwrap_or(width);
        widths.push(next - edge);
        edge = next;
    }
    for index in 0..bytes.len() {
        if bytes[index] > 0 && widths[index] == 0 {
            if let Some(widest) = widths.iter_mut().max()
                && *widest > 1
            {
                *widest -= 1;
            }
            widths[index] = 1;
        }
    }
    widths
}

fn row(part: &MemoryUser, total: u64, name_width: usize, canvas: Canvas) -> String {
    let key = if canvas.colour { part.mark } else { part.letter };
    let name = truncate_str(&part.name, name_width, "…");
    let notes: Vec<&str> = part
        .notes
        .iter()
        .map(String::as_str)
        .filter(|note| !note.is_empty())
        .collect();
    format!(
        "  {} {} {} {:>10}  {}",
        canvas.coloured(&key.to_string(), part.colour),
        pad_str(&name, name_width, console::Alignment::Left, None),
        canvas.coloured(&row_bar(part.bytes, total, ROW_BAR), part.colour),
        Bytes(part.bytes).to_string(),
        canvas.dim(&notes.join(", "))
    )
}

/// A bar of the share of `total`, to an eighth of a character.
fn row_bar(bytes: u64, total: u64, width: usize) -> String {
    let eighths = u128::from(bytes) * width as u128 * 8 / u128::from(total.max(1));
    let eighths = usize::try_from(eighths).unwrap_or(0).clamp(1, width * 8);
    let bar = format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8]);
    pad_str(&bar, width, console::Alignment::Left, None).into_owned()
}

/// The job that the card works on.
fn running_line(job: &v1::JobInfo, canvas: Canvas) -> String {
    let mut line = format!(
        "  {} {} {} for {}: {}",
        canvas.coloured("▶", 112),
        job.kind,
        canvas.bold(&job.id),
        job.client_id,
        if job.stage.is_empty() {
            job.state.as_str()
        } else {
            job.stage.as_str()
        }
    );
    if job.steps > 1 {
        let done = (ROW_BAR * job.step as usize / job.steps as usize).min(ROW_BAR);
        line.push_str(&format!(
            " step {} of {} {}{}",
            job.step,
            job.steps,
            canvas.coloured(&"━".repeat(done), 112),
            canvas.dim(&"─".repeat(ROW_BAR - done))
        ));
    }
    format!(
        "{line} {}",
        canvas.dim(&format!("{}, {}", short_key(&job.model_key), seconds(job.age_ms)))
    )
}

/// A job that is on no card.
fn job_line(job: &v1::JobInfo) -> String {
    let place = match job.state.as_str() {
        "queued" if job.queue_position > 0 => format!("queued, {} ahead", job.queue_position),
        state if job.stage.is_empty() => state.to_owned(),
        state => format!("{state}, {}", job.stage),
    };
    format!(
        "{}  {place}  {} for {}  {}  {}",
        job.id,
        job.kind,
        job.client_id,
        short_key(&job.model_key),
        seconds(job.age_ms)
    )
}

/// A time, rounded for people.
fn seconds(milliseconds: u64) -> String {
    let whole = milliseconds / 1000;
    match whole {
        0..10 => format!("{:.1} s", milliseconds as f64 / 1000.0),
        10..120 => format!("{whole} s"),
        120..7200 => format!("{} min", whole / 60),
        _ => format!("{} h", whole / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const PIPE: Canvas = Canvas {
        width: 80,
        colour: false,
        cuts: false,
    };

    fn resident(name: &str, gib: u64) -> v1::ResidentComponent {
        v1::ResidentComponent {
            component: Some(v1::Component {
                name: name.to_owned(),
                bytes: gib * GIB,
                ..Default::default()
            }),
            state: "resident".to_owned(),
            idle_ms: 12_000,
            entries: vec!["me/model+full".to_owned()],
            ..Default::default()
        }
    }

    fn busy_card() -> v1::Status {
        let mut transformer = resident("transformer", 24);
        transformer.leases = 1;
        let mut vae = resident("vae", 8);
        vae.pinned = true;
        let holder = |name: &str, pid, gib| v1::Holder {
            name: name.to_owned(),
            pid,
            bytes: gib * GIB,
        };
        v1::Status {
            cards: vec![v1::CardStatus {
                id: "GPU-1a".to_owned(),
                name: "NVIDIA H100".to_owned(),
                state: "busy".to_owned(),
                policy: "shared".to_owned(),
                attention: "own kernels: libcudnn.so.9 cannot be loaded".to_owned(),
                worker_pid: 77,
                worker_restarts: 1,
                job_id: "job-1".to_owned(),
                memory: Some(v1::MemoryAccounts {
                    total: 80 * GIB,
                    components: 32 * GIB,
                    scratch: 8 * GIB,
                    context: GIB / 2,
                    workspaces: GIB / 64,
                    foreign: 20 * GIB,
                    free: 80 * GIB - 60 * GIB - GIB / 2 - GIB / 64,
                    usable: 9 * GIB,
                    ..Default::default()
                }),
                on_host: vec![
                    v1::HostComponent {
                        component: transformer.component.clone(),
                        bytes: 12 * GIB,
                        ..Default::default()
                    },
                    v1::HostComponent {
                        component: Some(v1::Component {
                            id: "of another component".to_owned(),
                            name: "text_encoder".to_owned(),
                            bytes: 9 * GIB,
                        }),
                        bytes: GIB,
                        ..Default::default()
                    },
                ],
                host_limit_bytes: 64 * GIB,
                residents: vec![transformer, vae],
                holders: vec![
                    holder("blender", 4242, 16),
                    holder("other processes", 0, 4),
                    holder("transformer, in use", 0, 24),
                ],
                reservations: vec![v1::Reservation {
                    id: "r".to_owned(),
                    label: "training".to_owned(),
                    bytes: 10 * GIB,
                    expires_in_ms: 55_000,
                    process_id: 0,
                }],
                ..Default::default()
            }],
            jobs: vec![
                v1::JobInfo {
                    id: "job-1".to_owned(),
                    client_id: "studio".to_owned(),
                    state: "running".to_owned(),
                    kind: "GenerateImage".to_owned(),
                    stage: "denoise".to_owned(),
                    step: 5,
                    steps: 20,
                    age_ms: 4_200,
                    model_key: "me/model+full".to_owned(),
                    ..Default::default()
                },
                v1::JobInfo {
                    id: "job-2".to_owned(),
                    client_id: "studio".to_owned(),
                    state: "queued".to_owned(),
                    kind: "Load".to_owned(),
                    queue_position: 1,
                    model_key: "me/model+full".to_owned(),
                    ..Default::default()
                },
            ],
            ..Default::default()
        }
    }

    #[test]
    fn a_busy_card_is_drawn_as_text_in_a_pipe() {
        let drawn = picture(&busy_card(), PIPE);
        let expected = "\
GPU-1a  NVIDIA H100  busy, shared, worker 77, restarted once
AAAAAAAAAAAAAAAAAAAAAAABBBBBBBB%%%%%%%%wcxxxxxxxxxxxxxxxxyyyy...................
80.0 GiB in all, 9.0 GiB usable
machine's memory: 13.0 GiB of at most 64.0 GiB (transformer 12.0 GiB; text_encoder 1.0 GiB, for its next use)
attention: own kernels: libcudnn.so.9 cannot be loaded
  A transformer     ███████▏                   24.0 GiB  in use, me/model+full
  B vae             ██▍                         8.0 GiB  idle 12 s, pinned, me/model+full
  % scratch         ██▍                         8.0 GiB  activations of the stage that runs
  w workspaces      ▏                          16.0 MiB  of libraries
  c context         ▏                         512.0 MiB  of the worker process itself
  x blender         ████▊                      16.0 GiB  foreign, pid 4242
  y other processes █▏                          4.0 GiB  foreign
  . free            █████▊                     19.5 GiB
    kept free for training: 10.0 GiB, 55 s left; moored release r
  ▶ GenerateImage job-1 for studio: denoise step 5 of 20 ━━━━━━────────────────── me/model+full, 4.2 s

job-2  queued, 1 ahead  Load for studio  me/model+full  0.0 s
latents 0 (0 B), text encodings 0 (0 B)";
        assert_eq!(drawn, expected);
    }

    #[test]
    fn the_bar_is_to_scale_and_each_part_has_a_character() {
        assert_eq!(widths(&[40, 20, 20], 80, 80), [40, 20, 20]);
        assert_eq!(widths(&[1, 40 << 30, 39 << 30], 80 << 30, 60), [1, 29, 29]);
        assert_eq!(widths(&[], 80, 60), [0; 0]);
        for parts in 1..50_u64 {
            let bytes: Vec<u64> = (0..parts).map(|part| part * part * 7 + 1).collect();
            let drawn = widths(&bytes, bytes.iter().sum(), 60);
            assert_eq!(drawn.iter().sum::<usize>(), 60, "{bytes:?}");
            assert!(drawn.iter().all(|width| *width > 0), "{drawn:?}");
        }
    }

    #[test]
    fn colours_are_drawn_only_on_a_canvas_with_colour() {
        let status = busy_card();
        assert!(!picture(&status, PIPE).contains('\u{1b}'));
        let colour = Canvas { colour: true, ..PIPE };
        let drawn = picture(&status, colour);
        for colour in COMPONENT_COLOURS[..2].iter().chain(&FOREIGN_COLOURS[..2]) {
            assert!(drawn.contains(&format!("\u{1b}[38;5;{colour}m")), "{drawn:?}");
        }
        let narrow = Canvas {
            width: 60,
            cuts: true,
            ..colour
        };
        for line in picture(&status, narrow).lines() {
            assert!(measure_text_width(line) <= 60, "{line}");
        }
    }
}
