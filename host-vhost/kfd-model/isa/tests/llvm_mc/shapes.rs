//! Assembly texts of every opcode in every form with every sort of operand.
//!
//! Many do not exist (a modifier that an operation lacks, registers that a processor lacks): LLVM refuses them. One
//! operand is varied at a time, the others stand at their first value.

use kfd_isa::op::{Kind, Row, Traits};
use kfd_isa::{Encoding, Op};

/// A way to write an opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Its own encoding.
    Own,
    /// VOP3 of what has a shorter one.
    E64,
    /// Sub-dword.
    Sdwa,
    /// Lane-crossing.
    Dpp,
    /// FLAT as GLOBAL.
    Global,
    /// FLAT as SCRATCH.
    Scratch,
}

/// All of them.
pub const FORMS: [Form; 6] = [Form::Own, Form::E64, Form::Sdwa, Form::Dpp, Form::Global, Form::Scratch];

impl Form {
    /// Whether the table says that the opcode has this form.
    pub fn is_of(self, row: &Row) -> bool {
        match self {
            Self::Own => true,
            // These are written alike in both: with no operands there is nothing to tell the forms apart.
            Self::E64 => row.traits.contains(Traits::E64) && !row.src.is_empty(),
            Self::Sdwa => row.traits.contains(Traits::SDWA),
            Self::Dpp => row.traits.contains(Traits::DPP),
            Self::Global => row.encoding == Encoding::Flat,
            Self::Scratch => row.traits.contains(Traits::SCRATCH),
        }
    }
}

/// A text.
#[derive(Debug)]
pub struct Shape {
    /// What it is of.
    pub op: Op,
    /// The form it asks for.
    pub form: Form,
    /// The line for the assembler.
    pub text: String,
}

/// The values of an operand.
type Slot = Vec<String>;

/// All texts of an opcode.
pub fn of(row: &Row) -> Vec<Shape> {
    let mut shapes = Shapes { row, all: Vec::new() };
    match row.encoding {
        Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc => shapes.scalar(),
        Encoding::Sopk => shapes.sopk(),
        Encoding::Sopp => shapes.sopp(),
        Encoding::Smem => shapes.smem(),
        Encoding::Ds => shapes.ds(),
        Encoding::Flat | Encoding::Global | Encoding::Scratch => shapes.flat(),
        Encoding::Mubuf => shapes.mubuf(),
        Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc => {
            shapes.vector_own();
            // Without operands the other forms are the same with bits that mean nothing.
            if !row.src.is_empty() {
                shapes.vector_long(Form::E64, "_e64");
                shapes.sdwa();
                shapes.dpp();
            }
        }
        Encoding::Vop3 | Encoding::Vop3p => shapes.vector_long(Form::Own, ""),
    }
    shapes.all
}

fn slot(values: &[&str]) -> Slot {
    values.iter().map(|value| (*value).to_owned()).collect()
}

/// Registers `first` to `first + count - 1` with a prefix.
fn registers(prefix: &str, first: u32, count: u32) -> String {
    if count == 1 { format!("{prefix}{first}") } else { format!("{prefix}[{first}:{}]", first + count - 1) }
}

/// Scalar registers of a kind: the first, the last, and those with names.
fn scalar(kind: Kind) -> Slot {
    let count = u32::from(kind.registers());
    let align = count.min(4);
    let mut values = vec![
        registers("s", 4, count),
        registers("s", (102 - count) / align * align, count),
        registers("ttmp", 0, count),
        registers("ttmp", 16 - count, count),
    ];
    let named: &[&str] = match count {
        1 => &[
            "vcc_lo",
            "vcc_hi",
            "m0",
            "exec_lo",
            "exec_hi",
            "flat_scratch_lo",
            "flat_scratch_hi",
            "xnack_mask_lo",
            "xnack_mask_hi",
        ],
        2 => &["vcc", "exec", "flat_scratch", "xnack_mask"],
        _ => &[],
    };
    values.extend(slot(named));
    values
}

/// Inline constants.
const INLINE: [&str; 14] =
    ["0", "1", "64", "-1", "-16", "0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494"];

/// What is neither a register nor an inline constant.
const SPECIAL: [&str; 13] = [
    "0x12345678",
    "65",
    "0x3456",
    "-17",
    "0.15915494309189532",
    "src_shared_base",
    "src_shared_limit",
    "src_private_base",
    "src_private_limit",
    "src_pops_exiting_wave_id",
    "src_vccz",
    "src_execz",
    "src_scc",
];

/// Scalar registers and constants.
fn scalar_source(kind: Kind) -> Slot {
    let mut values = scalar(kind);
    values.extend(slot(&INLINE));
    values.extend(slot(&SPECIAL));
    values
}

fn vector(kind: Kind, first: u32) -> Slot {
    let count = u32::from(kind.registers());
    vec![registers("v", first, count), registers("v", 0, count), registers("v", 256 - count, count)]
}

/// All that a source of a vector instruction may be.
fn any_source(kind: Kind, first: u32) -> Slot {
    let mut values = vector(kind, first);
    values.extend(scalar_source(kind));
    values.push("lds_direct".to_owned());
    values
}

/// The same with modifiers, which LLVM refuses where there are none.
fn modified(values: Slot) -> Slot {
    let mut all = values;
    let constants = all.iter().skip(1).filter(|value| !value.starts_with('v')).cloned().collect::<Vec<_>>();
    let first = all.first().cloned().unwrap();
    all.extend([format!("-{first}"), format!("|{first}|"), format!("-|{first}|")]);
    all.extend(constants.iter().take(2).flat_map(|value| [format!("-{value}"), format!("|{value}|")]));
    all.extend(["neg(1)", "neg(1.0)", "-|4.0|", "|-4.0|"].map(str::to_owned));
    all
}

struct Shapes<'a> {
    row: &'a Row,
    all: Vec<Shape>,
}

impl Shapes<'_> {
    fn push(&mut self, form: Form, text: String) {
        self.all.push(Shape { op: self.row.op, form, text });
    }

    /// The texts with one slot varied at a time, and with each suffix.
    fn vary(&mut self, form: Form, name: &str, slots: &[Slot], suffixes: &[&str]) {
        let first: Vec<&str> = slots.iter().map(|slot| slot.first().unwrap().as_str()).collect();
        for suffix in suffixes {
            self.push(form, format!("{name} {} {suffix}", first.join(", ")));
        }
        let base = suffixes.first().copied().unwrap_or_default();
        for (n, slot) in slots.iter().enumerate() {
            for value in slot.iter().skip(1) {
                let mut operands = first.clone();
                operands[n] = value;
                self.push(form, format!("{name} {} {base}", operands.join(", ")));
            }
        }
    }

    fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.row.src.iter().copied().filter(|kind| *kind != Kind::None)
    }

    fn scalar(&mut self) {
        let mut slots = Vec::new();
        if self.row.dst != Kind::None {
            slots.push(scalar(self.row.dst));
        }
        // LLVM lets relative addressing begin at registers of which there is one.
        let is_relative = matches!(self.row.op, Op::SMovrelsB32 | Op::SMovrelsB64);
        slots.extend(self.kinds().map(if is_relative { scalar } else { scalar_source }));
        if self.row.op == Op::SSetGprIdxOn {
            slots.push(slot(&["0", "gpr_idx(SRC0)", "gpr_idx(SRC1,DST)", "gpr_idx(SRC0,SRC1,SRC2,DST)"]));
        }
        self.vary(Form::Own, self.row.name, &slots, &[""]);
    }

    fn sopk(&mut self) {
        let hwreg = slot(&[
            "hwreg(HW_REG_MODE)",
            "hwreg(HW_REG_STATUS, 3, 4)",
            "hwreg(HW_REG_TRAPSTS, 0, 31)",
            "hwreg(HW_REG_IB_STS, 31, 1)",
            "hwreg(HW_REG_SH_MEM_BASES, 16, 16)",
            "hwreg(HW_REG_GPR_ALLOC)",
            "hwreg(HW_REG_LDS_ALLOC)",
            "hwreg(HW_REG_HW_ID)",
            "hwreg(20)",
            "hwreg(63, 1, 32)",
        ]);
        let imm = slot(&["0x1234", "0", "1", "64", "65", "0x8000", "0xffff"]);
        let slots = match self.row.op {
            Op::SGetregB32 => vec![scalar(Kind::I32), hwreg],
            Op::SSetregB32 => vec![hwreg, scalar(Kind::I32)],
            Op::SSetregImm32B32 => vec![hwreg, slot(&["0x12345678", "0", "64", "-1", "0xff", "0x3f800000"])],
            _ => {
                let read = self.row.src.first().copied().unwrap_or(Kind::None);
                vec![scalar(if self.row.dst == Kind::None { read } else { self.row.dst }), imm]
            }
        };
        self.vary(Form::Own, self.row.name, &slots, &[""]);
    }

    fn sopp(&mut self) {
        let operands: &[&str] = match self.row.op {
            _ if self.row.traits.contains(Traits::NO_IMM) => &[""],
            Op::SWaitcnt => &[
                "0",
                "vmcnt(0)",
                "vmcnt(15)",
                "vmcnt(16)",
                "vmcnt(62)",
                "expcnt(0)",
                "expcnt(6)",
                "lgkmcnt(0)",
                "lgkmcnt(14)",
                "vmcnt(1) lgkmcnt(2)",
                "vmcnt(63) expcnt(7) lgkmcnt(15)",
                "0xffff",
            ],
            Op::SSendmsg | Op::SSendmsghalt => &[
                "0",
                "sendmsg(MSG_INTERRUPT)",
                "sendmsg(MSG_SAVEWAVE)",
                "sendmsg(MSG_GET_DOORBELL)",
                "sendmsg(MSG_GS_ALLOC_REQ)",
                "sendmsg(MSG_GS, GS_OP_EMIT, 1)",
                "sendmsg(MSG_GS_DONE, GS_OP_NOP)",
                "sendmsg(MSG_SYSMSG, SYSMSG_OP_TTRACE_PC)",
                "sendmsg(11, 2, 3)",
                "0x1234",
                "0xffff",
            ],
            Op::SSetGprIdxMode => &["0", "gpr_idx(SRC0)", "gpr_idx(SRC0,DST)", "0x10", "0xffff"],
            _ => &["0", "1", "9", "10", "64", "65", "0x7fff", "0x8000", "0xffff"],
        };
        for operand in operands {
            self.push(Form::Own, format!("{} {operand}", self.row.name));
        }
    }

    fn smem(&mut self) {
        let row = self.row;
        let mut slots = Vec::new();
        if matches!(row.op, Op::SAtcProbe | Op::SAtcProbeBuffer) {
            slots.push(slot(&["7", "0", "127"]));
        } else if let Some(kind) = row.src.get(2).copied().or((row.dst != Kind::None).then_some(row.dst)) {
            slots.push(scalar(kind));
        }
        if let Some(base) = row.src.first() {
            slots.push(scalar(*base));
            let mut offsets = slot(&["0x10", "0", "4", "0xfffff", "-4", "-0x100000"]);
            offsets.extend(scalar(Kind::I32));
            slots.push(offsets);
        }
        self.vary(Form::Own, row.name, &slots, &["", "glc"]);
    }

    fn ds(&mut self) {
        let row = self.row;
        let mut slots = Vec::new();
        if row.dst != Kind::None {
            slots.push(vector(row.dst, 10));
        }
        for (n, kind) in row.src.iter().enumerate() {
            if *kind != Kind::None {
                slots.push(vector(*kind, 20 + 8 * n as u32));
            }
        }
        // The first is also the base of what is varied, and has to exist.
        let mut suffixes = vec![""];
        if row.traits.contains(Traits::GDS_ONLY) {
            suffixes = vec!["gds", "offset:4 gds", "offset:65535 gds", ""];
        } else if row.op == Op::DsSwizzleB32 {
            suffixes.extend([
                "offset:0xffff",
                "offset:0x8000",
                "offset:swizzle(QUAD_PERM,0,1,2,3)",
                "offset:swizzle(QUAD_PERM,3,2,1,0)",
                "offset:swizzle(SWAP,1)",
                "offset:swizzle(SWAP,16)",
                "offset:swizzle(REVERSE,2)",
                "offset:swizzle(REVERSE,32)",
                "offset:swizzle(BROADCAST,2,1)",
                "offset:swizzle(BROADCAST,8,7)",
                "offset:swizzle(BROADCAST,32,31)",
                "offset:swizzle(BITMASK_PERM,\"01pip\")",
                "offset:swizzle(BITMASK_PERM,\"iiiii\")",
                "offset:0x1f gds",
            ]);
        } else if row.traits.contains(Traits::OFFSETS2) {
            suffixes.extend(["offset0:1", "offset1:2", "offset0:255 offset1:255", "offset0:3 gds"]);
        } else {
            suffixes.extend(["offset:1", "offset:65535", "gds", "offset:4 gds"]);
        }
        self.vary(Form::Own, row.name, &slots, &suffixes);
    }

    fn flat(&mut self) {
        let row = self.row;
        let bare = row.name.strip_prefix("flat_").unwrap();
        let data = row.src.get(1).map(|kind| vector(*kind, 20));
        let is_atomic = row.traits.contains(Traits::ATOMIC);
        for (form, prefix) in [(Form::Own, "flat"), (Form::Global, "global"), (Form::Scratch, "scratch")] {
            let name = format!("{prefix}_{bare}");
            let off = || slot(&["off"]);
            // Address registers and what stands in SADDR's place.
            let addresses: &[(Slot, Option<Slot>)] = &match form {
                Form::Own => vec![(vector(Kind::I64, 2), None)],
                Form::Global => {
                    vec![(vector(Kind::I64, 2), Some(off())), (vector(Kind::I32, 2), Some(scalar(Kind::I64)))]
                }
                _ => vec![(vector(Kind::I32, 2), Some(off())), (off(), Some(scalar(Kind::I32)))],
            };
            for (address, saddr) in addresses {
                for returning in [false, true] {
                    if returning && !is_atomic {
                        continue;
                    }
                    let mut slots = Vec::new();
                    if row.dst != Kind::None && (returning || !is_atomic) {
                        slots.push(vector(row.dst, 10));
                    }
                    slots.push(address.clone());
                    slots.extend(data.clone());
                    slots.extend(saddr.clone());
                    let suffixes: &[&str] = if returning {
                        &["glc", "offset:8 glc", "glc slc"]
                    } else {
                        &["", "offset:8", "offset:4095", "offset:-4096", "glc", "slc", "glc slc", "lds"]
                    };
                    self.vary(form, &name, &slots, suffixes);
                }
            }
        }
    }

    fn mubuf(&mut self) {
        let row = self.row;
        if row.src.is_empty() {
            return self.push(Form::Own, row.name.to_owned());
        }
        let mut constants = scalar(Kind::I32);
        constants.extend(slot(&INLINE));
        constants.extend(slot(&SPECIAL));
        let tail = [scalar(Kind::B128), constants];
        if row.op == Op::BufferStoreLdsDword {
            return self.vary(Form::Own, row.name, &tail, &["lds", "offset:4095 lds", "lds glc slc", ""]);
        }
        let data = row.src.get(1).copied().unwrap_or(row.dst);
        // A store has no result that could say that it failed, though LLVM lets it be asked for.
        let fails = if row.src.len() > 1 { "" } else { "tfe" };
        // LDS takes a dword a lane at most, though LLVM lets more be asked for.
        let [lds, lds_offset] = if data.registers() == 1 { ["lds", "offset:1 lds"] } else { [""; 2] };
        let flags = ["", "offset:4095", "glc", "slc", "offset:1 glc slc", fails, lds, lds_offset];
        let addresses = [
            (slot(&["off"]), ""),
            (vector(Kind::I32, 2), "offen"),
            (vector(Kind::I32, 2), "idxen"),
            (vector(Kind::I64, 2), "idxen offen"),
        ];
        for (address, mode) in addresses {
            let suffixes: Vec<String> = flags.iter().map(|flags| format!("{mode} {flags}")).collect();
            let suffixes: Vec<&str> = suffixes.iter().map(String::as_str).collect();
            let mut slots = vec![vector(data, 10), address];
            slots.extend(tail.clone());
            self.vary(Form::Own, row.name, &slots, &suffixes);
        }
    }

    /// The destination and the operands that are implied in short forms.
    fn short_slots(&self, first: fn(Kind, u32) -> Slot, second: fn(Kind, u32) -> Slot) -> Vec<Slot> {
        let row = self.row;
        let mut slots = Vec::new();
        if row.traits.contains(Traits::SGPR_DST) {
            slots.push(scalar(row.dst));
        } else if row.dst == Kind::Mask {
            slots.push(slot(&["vcc"]));
        } else if row.dst != Kind::None {
            slots.push(vector(row.dst, 10));
        }
        if row.traits.contains(Traits::CARRY_OUT) {
            slots.push(slot(&["vcc"]));
        }
        let count = if row.traits.contains(Traits::ACCUMULATE) { 2 } else { row.src.len() };
        for (n, kind) in row.src.iter().copied().enumerate().take(count) {
            let literal = n == 1 && row.traits.contains(Traits::LITERAL_B)
                || n == 2 && row.traits.contains(Traits::LITERAL_C);
            slots.push(match (n, kind) {
                (_, Kind::Mask) => slot(&["vcc"]),
                _ if literal => slot(&["0x1234", "0", "1.0", "0xffff"]),
                (0, _) => first(kind, 20),
                _ => second(kind, 20 + 8 * n as u32),
            });
        }
        slots
    }

    fn vector_own(&mut self) {
        // LLVM lets these read a constant or LDS too; what that is to mean is said nowhere.
        let is_lanewise = !matches!(self.row.op, Op::VReadfirstlaneB32 | Op::VSwapB32);
        let slots = self.short_slots(if is_lanewise { any_source } else { vector }, vector);
        let suffix =
            if self.row.traits.contains(Traits::E64) && !self.row.src.is_empty() { "_e32" } else { "" };
        self.vary(Form::Own, &format!("{}{suffix}", self.row.name), &slots, &[""]);
    }

    /// VOP3 and VOP3P.
    fn vector_long(&mut self, form: Form, suffix: &str) {
        let row = self.row;
        let mut slots = Vec::new();
        if row.traits.contains(Traits::SGPR_DST) || row.dst == Kind::Mask {
            slots.push(scalar(row.dst));
        } else {
            slots.push(vector(row.dst, 10));
        }
        if row.traits.contains(Traits::CARRY_OUT) {
            slots.push(scalar(Kind::Mask));
        }
        let count = if row.traits.contains(Traits::ACCUMULATE) { 2 } else { row.src.len() };
        for (n, kind) in row.src.iter().copied().enumerate().take(count) {
            let first = 20 + 8 * n as u32;
            slots.push(match (row.op, n) {
                _ if kind == Kind::Mask => scalar(kind),
                (Op::VReadlaneB32, 0) => vector(kind, first),
                (Op::VReadlaneB32, 1) | (Op::VWritelaneB32, _) => scalar_source(kind),
                _ => modified(any_source(kind, first)),
            });
        }
        let suffixes: &[&str] = if row.encoding == Encoding::Vop3p {
            &[
                "",
                "clamp",
                "op_sel:[1,0]",
                "op_sel:[0,1] op_sel_hi:[1,0]",
                "op_sel_hi:[0,0]",
                "neg_lo:[1,0]",
                "neg_hi:[0,1]",
                "neg_lo:[1,1] neg_hi:[1,1]",
                "op_sel:[1,0,1]",
                "op_sel_hi:[0,1,0]",
                "op_sel_hi:[1,1,1]",
                "op_sel:[1,1,1] op_sel_hi:[0,0,0] neg_lo:[0,1,0] neg_hi:[0,0,1] clamp",
            ]
        } else {
            &[
                "",
                "clamp",
                "mul:2",
                "mul:4",
                "div:2",
                "clamp mul:2",
                "op_sel:[1,0,0]",
                "op_sel:[0,1,1]",
                "op_sel:[1,0,0,0]",
                "op_sel:[0,1,0,1]",
                "op_sel:[0,0,1,0] clamp",
            ]
        };
        // LLVM lets some packed integers be negated; what that is to mean is said nowhere.
        let is_float = row.src.iter().all(|kind| kind.is_float());
        let suffixes: Vec<&str> =
            suffixes.iter().copied().filter(|suffix| is_float || !suffix.contains("neg_")).collect();
        self.vary(form, &format!("{}{suffix}", row.name), &slots, &suffixes);
    }

    fn sdwa(&mut self) {
        let row = self.row;
        let source = |kind, first| {
            let mut values = vector(kind, first);
            values.extend(scalar(kind));
            values.extend(slot(&INLINE));
            values.insert(1, format!("sext({})", values[0]));
            modified(values)
        };
        let mut slots = self.short_slots(source, source);
        if row.dst == Kind::Mask {
            slots[0] = scalar(Kind::Mask);
        }
        let sels = ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"];
        let is_unary = row.encoding == Encoding::Vop1;
        let mut suffixes = Vec::new();
        let tail = |first: &str, second: &str| {
            if is_unary { format!("src0_sel:{first}") } else { format!("src0_sel:{first} src1_sel:{second}") }
        };
        for sel in sels {
            suffixes.push(
                (if row.dst == Kind::Mask { "" } else { "dst_sel:WORD_1 dst_unused:UNUSED_PAD" }.to_owned()
                    + " "
                    + &tail(sel, "DWORD"))
                    .trim_start()
                    .to_owned(),
            );
            suffixes.push(tail("BYTE_1", sel));
            suffixes.push(format!("dst_sel:{sel} dst_unused:UNUSED_SEXT {}", tail("DWORD", "WORD_0")));
            suffixes.push(format!("dst_sel:{sel} dst_unused:UNUSED_PRESERVE {}", tail("DWORD", "WORD_1")));
        }
        for modifier in ["clamp", "mul:2", "mul:4", "div:2", "clamp mul:2"] {
            suffixes
                .push(format!("{modifier} dst_sel:DWORD dst_unused:UNUSED_PAD {}", tail("DWORD", "DWORD")));
        }
        let suffixes: Vec<&str> = suffixes.iter().map(String::as_str).collect();
        self.vary(Form::Sdwa, &format!("{}_sdwa", row.name), &slots, &suffixes);
    }

    fn dpp(&mut self) {
        let source = |kind, first| modified(vector(kind, first));
        let slots = self.short_slots(source, source);
        let mut suffixes = Vec::new();
        for ctrl in [
            "quad_perm:[0,1,2,3]",
            "quad_perm:[3,2,1,0]",
            "row_shl:1",
            "row_shl:15",
            "row_shr:1",
            "row_shr:15",
            "row_ror:1",
            "row_ror:15",
            "wave_shl:1",
            "wave_rol:1",
            "wave_shr:1",
            "wave_ror:1",
            "row_mirror",
            "row_half_mirror",
            "row_bcast:15",
            "row_bcast:31",
        ] {
            suffixes.push(format!("{ctrl} row_mask:0xf bank_mask:0xf"));
        }
        for masks in ["row_mask:0x0 bank_mask:0x1", "row_mask:0xa bank_mask:0x5 bound_ctrl:0", "bound_ctrl:0"]
        {
            suffixes.push(format!("row_shr:1 {masks}"));
        }
        let suffixes: Vec<&str> = suffixes.iter().map(String::as_str).collect();
        self.vary(Form::Dpp, &format!("{}_dpp", self.row.name), &slots, &suffixes);
    }
}
