//! Which GPUs of the host a VM sees.

use kfd_host::topology::GpuNode;
use thiserror::Error;

/// Why the selectors cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SelectError {
    /// It has none of the known forms.
    #[error(
        "GPU selector {selector:?} has no known form; use all, an index, gpu_id:N, renderD128, a PCI address (0000:03:00.0), uuid:HEX or gfx906"
    )]
    Form {
        /// The selector.
        selector: String,
    },
    /// There is no such GPU.
    #[error("GPU selector {selector:?} matches no GPU; {there}")]
    Nothing {
        /// The selector.
        selector: String,
        /// What there is, in words.
        there: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Selector {
    All,
    Index(usize),
    GpuId(u32),
    RenderMinor(u32),
    Pci { domain: u32, location: u32 },
    Uuid(u64),
    Gfx(String),
}

/// Bits of `location_id` that are a PCI bus, device and function (`pci_dev_id`); the kernel puts the
/// number of a partition above (kfd_topology_add_device).
const PCI_MASK: u32 = 0xffff;

fn parse(text: &str) -> Option<Selector> {
    if text == "all" {
        return Some(Selector::All);
    }
    if let Some(number) = text.strip_prefix("gpu_id:") {
        return number.parse().ok().map(Selector::GpuId);
    }
    if let Some(number) = text.strip_prefix("renderD") {
        return number.parse().ok().map(Selector::RenderMinor);
    }
    if let Some(hex) = text.strip_prefix("uuid:") {
        return u64::from_str_radix(hex, 16).ok().filter(|uuid| *uuid != 0).map(Selector::Uuid);
    }
    if text
        .strip_prefix("gfx")
        .is_some_and(|rest| rest.len() >= 3 && rest.chars().all(|c| c.is_ascii_hexdigit()))
    {
        return Some(Selector::Gfx(text.to_ascii_lowercase()));
    }
    if text.contains(':') {
        return parse_pci(text);
    }
    text.parse().ok().map(Selector::Index)
}

/// `0000:03:00.0`, or without the domain `03:00.0`.
fn parse_pci(text: &str) -> Option<Selector> {
    let (address, function) = text.rsplit_once('.')?;
    let parts: Vec<&str> = address.split(':').collect();
    let (domain, bus, device) = match parts.as_slice() {
        [domain, bus, device] => (*domain, *bus, *device),
        [bus, device] => ("0", *bus, *device),
        _ => return None,
    };
    let hex = |text: &str, max: u32| u32::from_str_radix(text, 16).ok().filter(|number| *number <= max);
    let location = hex(bus, 0xff)? << 8 | hex(device, 0x1f)? << 3 | hex(function, 7)?;
    Some(Selector::Pci { domain: hex(domain, u32::MAX)?, location })
}

/// The name of a `gfx_target_version`: decimal major, hexadecimal minor and stepping.
pub fn gfx_name(version: u32) -> String {
    let part = |divisor: u32, modulus: u32| {
        version.checked_div(divisor).and_then(|rest| rest.checked_rem(modulus)).unwrap_or(0)
    };
    format!("gfx{}{:x}{:x}", part(10_000, 10_000), part(100, 100), part(1, 100))
}

fn pci_name(gpu: &GpuNode) -> String {
    let location = gpu.location_id;
    format!("{:04x}:{:02x}:{:02x}.{}", gpu.domain, location >> 8 & 0xff, location >> 3 & 0x1f, location & 7)
}

/// The GPUs in words.
pub fn describe(gpus: &[GpuNode]) -> String {
    if gpus.is_empty() {
        return "this host has no GPU that KFD knows".into();
    }
    let list: Vec<String> = (0usize..)
        .zip(gpus)
        .map(|(index, gpu)| {
            let uuid =
                if gpu.unique_id == 0 { String::new() } else { format!(", uuid:{:016x}", gpu.unique_id) };
            format!(
                "{index} = {}, renderD{}, {}, gpu_id:{}{uuid}",
                gfx_name(gpu.gfx_target_version),
                gpu.render_minor,
                pci_name(gpu),
                gpu.gpu_id
            )
        })
        .collect();
    format!("this host has: {}", list.join("; "))
}

fn matches(selector: &Selector, index: usize, gpu: &GpuNode) -> bool {
    match selector {
        Selector::All => true,
        Selector::Index(wanted) => index == *wanted,
        Selector::GpuId(wanted) => gpu.gpu_id == *wanted,
        Selector::RenderMinor(wanted) => gpu.render_minor == *wanted,
        Selector::Pci { domain, location } => {
            gpu.domain == *domain && gpu.location_id & PCI_MASK == *location
        }
        Selector::Uuid(wanted) => gpu.unique_id == *wanted,
        Selector::Gfx(wanted) => gfx_name(gpu.gfx_target_version) == *wanted,
    }
}

/// The GPUs that the selectors name, each once, in the host's order. No selector is the same as `all`, which may
/// match nothing on a host without GPUs; any other has to match.
pub fn select(gpus: &[GpuNode], selectors: &[String]) -> Result<Vec<GpuNode>, SelectError> {
    let mut chosen = vec![selectors.is_empty(); gpus.len()];
    for text in selectors {
        let selector = parse(text).ok_or_else(|| SelectError::Form { selector: text.clone() })?;
        let mut found = selector == Selector::All;
        for ((index, gpu), chosen) in (0usize..).zip(gpus).zip(&mut chosen) {
            if matches(&selector, index, gpu) {
                found = true;
                *chosen = true;
            }
        }
        if !found {
            return Err(SelectError::Nothing { selector: text.clone(), there: describe(gpus) });
        }
    }
    Ok(gpus.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(gpu, _)| gpu.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<GpuNode> {
        let gpu = |node, render_minor, version, location_id, unique_id| GpuNode {
            node,
            gpu_id: 1000 * node,
            render_minor,
            gfx_target_version: version,
            domain: 0,
            location_id,
            unique_id,
            xccs: 1,
            cus: 0,
        };
        vec![
            gpu(1, 128, 90006, 0x0300, 0xabc),
            gpu(2, 129, 90010, 0x4300, 0),
            gpu(3, 130, 110000, 0x8300, 0xdef),
            // A partition of the third.
            gpu(4, 131, 110000, 0x1000_8300, 0xdef),
        ]
    }

    fn nodes(selectors: &[&str]) -> Result<Vec<u32>, SelectError> {
        let selectors: Vec<String> = selectors.iter().map(|text| text.to_string()).collect();
        Ok(select(&host(), &selectors)?.iter().map(|gpu| gpu.node).collect())
    }

    #[test]
    fn every_form() {
        assert_eq!(nodes(&[]).unwrap(), [1, 2, 3, 4]);
        assert_eq!(nodes(&["all"]).unwrap(), [1, 2, 3, 4]);
        assert_eq!(nodes(&["0"]).unwrap(), [1]);
        assert_eq!(nodes(&["gpu_id:2000"]).unwrap(), [2]);
        assert_eq!(nodes(&["renderD131"]).unwrap(), [4]);
        assert_eq!(nodes(&["0000:43:00.0"]).unwrap(), [2]);
        assert_eq!(nodes(&["03:00.0"]).unwrap(), [1]);
        assert_eq!(nodes(&["0000:83:00.0"]).unwrap(), [3, 4], "both partitions");
        assert_eq!(nodes(&["uuid:DEF"]).unwrap(), [3, 4]);
        assert_eq!(nodes(&["gfx906"]).unwrap(), [1]);
        assert_eq!(nodes(&["gfx90a"]).unwrap(), [2]);
        assert_eq!(nodes(&["gfx1100"]).unwrap(), [3, 4]);
        assert_eq!(nodes(&["3", "gfx906", "0"]).unwrap(), [1, 4], "each once, in the host's order");
    }

    #[test]
    fn what_matches_nothing_lists_what_there_is() {
        let text = nodes(&["gfx906", "gfx942"]).unwrap_err().to_string();
        for part in ["gfx942", "gfx906", "renderD128", "0000:03:00.0", "gpu_id:1000", "uuid:0000000000000abc"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = select(&[], &["0".into()]).unwrap_err().to_string();
        assert!(text.contains("no GPU"), "{text}");
    }

    #[test]
    fn a_host_without_gpus_is_no_error_where_nothing_is_asked_for() {
        assert_eq!(select(&[], &[]), Ok(vec![]));
        assert_eq!(select(&[], &["all".into()]), Ok(vec![]));
    }

    #[test]
    fn what_has_no_form_says_which_forms_there_are() {
        for text in
            ["", "gpu", "-1", "gpu_id:x", "0000:03:20.0", "0000:03:00.8", "uuid:", "uuid:0", "a:b:c:d.0"]
        {
            assert!(matches!(nodes(&[text]), Err(SelectError::Form { .. })), "{text}");
        }
    }

    /// LLVM's names for the versions (AMDGPU processor table).
    #[test]
    fn names_of_target_versions() {
        for (version, name) in [
            (80003, "gfx803"),
            (90006, "gfx906"),
            (90010, "gfx90a"),
            (90402, "gfx942"),
            (100300, "gfx1030"),
            (110501, "gfx1151"),
        ] {
            assert_eq!(gfx_name(version), name);
        }
    }
}
