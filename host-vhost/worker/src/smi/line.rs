//! The kernel's lines (`KFD_EVENT_FMT_*` of linux/kfd_ioctl.h), and what a guest sees of them.

use kfd_abi::smi::{
    KFD_SMI_EVENT_GPU_POST_RESET, KFD_SMI_EVENT_GPU_PRE_RESET, KFD_SMI_EVENT_MSG_SIZE,
    KFD_SMI_EVENT_QUEUE_EVICTION, KFD_SMI_EVENT_QUEUE_RESTORE, KFD_SMI_EVENT_THERMAL_THROTTLE,
    KFD_SMI_EVENT_VMFAULT,
};

/// `KFD_SMI_EVENT_DROPPED_EVENT` of AMD's driver: a stream was full, and so many events were left out. Upstream's has no such event.
const DROPPED_EVENT: u32 = 14;

/// The guest process, and by what numbers the host's kernel knows it.
#[derive(Debug, Default)]
pub struct Guest {
    /// Its process id in the guest.
    pub pid: u32,
    /// Its name.
    pub name: Vec<u8>,
    /// Threads of this worker that have taken the address space of a GPU.
    pub tasks: Vec<u32>,
}

/// Puts pieces of text together to lines.
#[derive(Debug, Default)]
pub struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    /// Takes a piece, and gives the lines that it ends, without their newlines. What is longer than the kernel's lines is none
    /// of them, and left out.
    pub fn push(&mut self, piece: &[u8], mut line: impl FnMut(&[u8])) {
        for byte in piece {
            match byte {
                b'\n' => {
                    if self.begun.len() < KFD_SMI_EVENT_MSG_SIZE as usize {
                        line(&self.begun);
                    }
                    self.begun.clear();
                }
                _ if self.begun.len() < KFD_SMI_EVENT_MSG_SIZE as usize => self.begun.push(*byte),
                _ => {}
            }
        }
    }
}

/// The line as the guest sees it, with its newline; none where it is not the guest's to see.
///
/// # Errors
/// It is not one of the kernel's as they are known.
pub fn rewrite(line: &[u8], guest: &Guest) -> Result<Option<Vec<u8>>, String> {
    // The name of a task may have any bytes.
    let text = String::from_utf8_lossy(line);
    let unknown = || format!("a system management event of no known form: {}", line.escape_ascii());
    let (event, rest) = text.split_once(' ').ok_or_else(unknown)?;
    let event = u32::from_str_radix(event, 16).map_err(|_| unknown())?;
    match event {
        // "pid:name", of the thread that took the address space.
        KFD_SMI_EVENT_VMFAULT => {
            let (task, _) = rest.split_once(':').ok_or_else(unknown)?;
            let task = u32::from_str_radix(task, 16).map_err(|_| unknown())?;
            if !guest.tasks.contains(&task) {
                return Ok(None);
            }
            let mut line = format!("{event:x} {:x}:", guest.pid).into_bytes();
            line.extend(&guest.name);
            line.push(b'\n');
            Ok(Some(line))
        }
        KFD_SMI_EVENT_THERMAL_THROTTLE | KFD_SMI_EVENT_GPU_PRE_RESET | KFD_SMI_EVENT_GPU_POST_RESET => {
            Ok(Some(format!("{text}\n").into_bytes()))
        }
        // "time -pid gpu cause", "time -pid count". The kernel gives a process its own alone (kfd_smi_ev_enabled).
        KFD_SMI_EVENT_QUEUE_EVICTION | KFD_SMI_EVENT_QUEUE_RESTORE | DROPPED_EVENT => {
            let (time, rest) = rest.split_once(' ').ok_or_else(unknown)?;
            let (pid, rest) = rest.split_once(' ').ok_or_else(unknown)?;
            let number = |text: &str| text.parse::<u64>().map_err(|_| unknown());
            number(time)?;
            number(pid.strip_prefix('-').ok_or_else(unknown)?)?;
            Ok(Some(format!("{event:x} {time} -{} {rest}\n", guest.pid).into_bytes()))
        }
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> Guest {
        Guest { pid: 0x1234, name: b"program".into(), tasks: vec![0x77, 0x78] }
    }

    /// Lines by the formats of linux/kfd_ioctl.h (KFD_EVENT_FMT_*, Linux 6.12).
    #[test]
    fn a_guest_sees_its_own_number_and_name_and_no_fault_of_others() {
        let seen = |line: &str| {
            rewrite(line.as_bytes(), &guest()).map(|line| line.map(|line| String::from_utf8(line).unwrap()))
        };
        let shown = |line: &str| Ok(Some(line.to_owned()));
        assert_eq!(seen("1 77:kfd-worker"), shown("1 1234:program\n"));
        assert_eq!(seen("1 78:ring-3"), shown("1 1234:program\n"));
        assert_eq!(seen("1 79:kfd-worker"), Ok(None), "another process's");
        assert_eq!(seen("1 4d2:python3"), Ok(None));
        assert_eq!(seen("2 4:1f"), shown("2 4:1f\n"));
        assert_eq!(seen("3 1 mode1 by ring gfx"), shown("3 1 mode1 by ring gfx\n"));
        assert_eq!(seen("4 1 "), shown("4 1 \n"));
        assert_eq!(seen("9 123456789 -119 66af 1"), shown("9 123456789 -4660 66af 1\n"));
        assert_eq!(seen("a 123456790 -119 66af 0"), shown("a 123456790 -4660 66af 0\n"));
        // KFD_EVENT_FMT_DROPPED_EVENT of AMD's driver.
        assert_eq!(seen("e 123456791 -119 17"), shown("e 123456791 -4660 17\n"));
    }

    #[test]
    fn what_is_not_known_is_not_shown() {
        for line in [
            "",
            "1",
            "x 1:a",
            "1 77",
            "1 zz:a",
            "9 1 119 66af 1",
            "9 x -119 66af 1",
            "9 1 -119",
            "5 1 -119 @7f(1) 0->1",
            "c 77 kfd-worker",
            "d 77 kfd-worker",
            "e 1 119 17",
            "f 1 -119 17",
            "40 1",
            "-1 77:a",
        ] {
            assert!(rewrite(line.as_bytes(), &guest()).is_err(), "{line:?}");
        }
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let text = b"1 77:a\n2 4:1f\n9 1 -119 66af 1\n";
        for size in 1..text.len() {
            let (mut lines, mut whole) = (Lines::default(), Vec::new());
            for piece in text.chunks(size) {
                lines.push(piece, |line| whole.push(line.to_vec()));
            }
            assert_eq!(whole, [&b"1 77:a"[..], b"2 4:1f", b"9 1 -119 66af 1"], "pieces of {size}");
        }
        let (mut lines, mut whole) = (Lines::default(), Vec::new());
        lines.push(&[b'x'; 4096], |line| whole.push(line.to_vec()));
        lines.push(b"\n2 4:1f\n", |line| whole.push(line.to_vec()));
        assert_eq!(whole, [b"2 4:1f"]);
    }
}
